package events

import (
	"fmt"
	"hash/fnv"
	"strings"
)

// Partitions is the number of partitions that sessions are spread over.
const Partitions = 64

// Aspect is the last token of a log subject: whose writer it is.
type Aspect string

// The aspects. A session has life (session service) and run (holder of the epoch);
// the catalogue has one aspect for each kind of thing.
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

// Catalogued tells whether an aspect is one of the catalogue's.
func (a Aspect) Catalogued() bool {
	switch a {
	case Key, Agent, Instance, Environment, Skill, TenantBudget, LimitsAspect:
		return true
	}
	return false
}

// Subject names one chain of commits: ev.<partition>.<tenant>.<id>.<aspect>.
type Subject struct {
	Tenant string
	ID     string // a session id, or CatalogueID
	Aspect Aspect
}

// LifeOf is the subject of a session's life.
func LifeOf(tenant, session string) Subject { return Subject{tenant, session, Life} }

// RunOf is the subject of a session's runs.
func RunOf(tenant, session string) Subject { return Subject{tenant, session, Run} }

// CatalogueID stands in place of a session id in the subject of a catalogue
// entry: it follows from what must be unique, so that the guard of the log is
// the unique constraint.
func CatalogueID(kind Aspect, tenant, scope, org, slug string) string {
	return Derive("cat", string(kind), tenant, scope, org, slug)
}

// Partition is the partition of a session or catalogue id: FNV-1a mod 64.
func Partition(id string) int {
	h := fnv.New32a()
	h.Write([]byte(id)) // never fails
	return int(h.Sum32() % Partitions)
}

// PartitionToken is a partition as it stands in subjects: two hex digits.
func PartitionToken(p int) string { return fmt.Sprintf("%02x", p) }

// Partition of the subject.
func (s Subject) Partition() int { return Partition(s.ID) }

// String is the NATS subject. Its tokens must have been checked (Check).
func (s Subject) String() string {
	return "ev." + PartitionToken(s.Partition()) + "." + s.Tenant + "." + s.ID + "." + string(s.Aspect)
}

// Check reports an error unless every token may stand in a subject.
func (s Subject) Check() error {
	if err := CheckTenant("tenant", s.Tenant); err != nil {
		return err
	}
	switch {
	case s.Aspect == Life, s.Aspect == Run:
		return CheckID("sessionId", KindSession, s.ID)
	case s.Aspect.Catalogued():
		return CheckID("catalogue id", "cat", s.ID)
	}
	return fmt.Errorf("aspect: %q is not one of the log's", s.Aspect)
}

// ParseSubject reads a log subject back; the partition must be the id's.
func ParseSubject(subject string) (Subject, error) {
	t := strings.Split(subject, ".")
	if len(t) != 5 || t[0] != "ev" {
		return Subject{}, fmt.Errorf("subject %q is not ev.<partition>.<tenant>.<id>.<aspect>", clip(subject, 200))
	}
	s := Subject{Tenant: t[2], ID: t[3], Aspect: Aspect(t[4])}
	if err := s.Check(); err != nil {
		return Subject{}, fmt.Errorf("subject %q: %w", clip(subject, 200), err)
	}
	if t[1] != PartitionToken(s.Partition()) {
		return Subject{}, fmt.Errorf("subject %q: partition %s is not the id's %s", clip(subject, 200), t[1], PartitionToken(s.Partition()))
	}
	return s, nil
}

// DeltaSubject is where the text in flight of a session is published.
func DeltaSubject(tenant, session string) string {
	return "dl." + PartitionToken(Partition(session)) + "." + tenant + "." + session
}

// LiveSubject is where the projector announces a session's changes.
func LiveSubject(tenant, session string) string { return "live." + tenant + "." + session }
