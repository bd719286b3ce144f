package events

import (
	"fmt"
	"hash/fnv"
)

// MaxPartitions is the largest number of partitions of a log.
const MaxPartitions = 64

// Aspect is the last token of a log subject: life or run for a session, or the kind of a catalogue entry. Each aspect
// has one kind of writer.
type Aspect string

// The aspects. A session has life, written by the session service, and run, written by the executor that holds the
// epoch. Catalogue entries have one aspect per kind.
const (
	Life         Aspect = "life"
	Run          Aspect = "run"
	Key          Aspect = "key"
	Agent        Aspect = "agent"
	Instance     Aspect = "instance"
	Environment  Aspect = "environment"
	Skill        Aspect = "skill"
	TenantBudget Aspect = "budget"
	LimitsAspect Aspect = "limits"
)

// IsCatalogue reports whether an aspect belongs to the catalogue.
func (a Aspect) IsCatalogue() bool {
	switch a {
	case Key, Agent, Instance, Environment, Skill, TenantBudget, LimitsAspect:
		return true
	}
	return false
}

// Subject identifies one chain of commits. Partitioning.Subject returns its NATS subject.
type Subject struct {
	Tenant string
	ID     string // a session id, or the result of CatalogueID
	Aspect Aspect
}

// LifeSubject returns the subject of a session's life.
func LifeSubject(tenant, session string) Subject { return Subject{tenant, session, Life} }

// RunSubject returns the subject of a session's runs.
func RunSubject(tenant, session string) Subject { return Subject{tenant, session, Run} }

// CatalogueID returns the id that replaces the session id in the subject of a catalogue entry. It is derived from
// the fields that must be unique, so that the log's expected-sequence check is the unique constraint.
func CatalogueID(kind Aspect, tenant, scope, org, slug string) string {
	return DeriveID("cat", string(kind), tenant, scope, org, slug)
}

// Partition returns the partition of a session id or catalogue id among MaxPartitions: FNV-1a mod 64. The numbers of
// partitions, groups and shards of every log divide 64, so the remainder of Partition is the id's number among them.
func Partition(id string) int {
	h := fnv.New32a()
	h.Write([]byte(id)) // never fails
	return int(h.Sum32() % MaxPartitions)
}

// PartitionToken returns a partition as a token of subjects: two hex digits.
func PartitionToken(p int) string {
	const hex = "0123456789abcdef"
	return string([]byte{hex[p>>4&15], hex[p&15]})
}

// Partition returns the partition of the subject among MaxPartitions.
func (s Subject) Partition() int { return Partition(s.ID) }

// String returns the name of the subject in signatures, signed heads and reports. It does not depend on the log's
// Partitioning: it is the NATS subject in a log with MaxPartitions. The caller must have validated the tokens with
// Check.
func (s Subject) String() string { return Partitioning(0).Subject(s) }

// Check returns an error if a token is not allowed in a subject.
func (s Subject) Check() error {
	if err := CheckTenant("tenant", s.Tenant); err != nil {
		return err
	}
	switch {
	case s.Aspect == Life, s.Aspect == Run:
		return CheckID("sessionId", KindSession, s.ID)
	case s.Aspect.IsCatalogue():
		return CheckID("catalogue id", "cat", s.ID)
	}
	return fmt.Errorf("aspect: %q is unknown", s.Aspect)
}

// ParseSubject parses the form that Subject.String returns.
func ParseSubject(subject string) (Subject, error) { return Partitioning(0).ParseSubject(subject) }

// LiveSubject returns the subject on which the projector announces changes of a session.
func LiveSubject(tenant, session string) string { return "live." + tenant + "." + session }
