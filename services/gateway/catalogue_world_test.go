package gateway_test

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/definition"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
	"github.com/spoolhq/spool/pkg/topology"
)

func reference(s string) (r events.Reference) {
	if s != "" {
		var err error
		if r, err = events.ParseReference(s); err != nil {
			panic(err)
		}
	}
	return r
}

func references(list []string) (out []events.Reference) {
	for _, s := range list {
		out = append(out, reference(s))
	}
	return out
}

func texts(list []events.Reference) []string {
	out := []string{}
	for _, r := range list {
		out = append(out, r.String())
	}
	return out
}

// change is the effect of a command on an entry.
type change struct {
	ref     events.Reference
	command versions.Command
	spec    any // spec of a new version
	pushed  *events.SkillPushed
}

// applyCatalogue handles commands about the catalogue, like the session and skills services.
func (w *world) applyCatalogue(c command.Command, read func(any)) (command.Answer, bool) {
	kind, ch, err := w.changeOf(c, read)
	if kind == "" {
		return command.Answer{}, false
	}
	if err == nil {
		var a command.Answer
		if a, err = w.applyEntry(kind, c.Tenant, ch); err == nil {
			return a, true
		}
	}
	var refused *command.Error
	if !errors.As(err, &refused) {
		w.t.Errorf("%s: %v", c.Type, err)
	}
	return command.Answer{Error: refused}, true
}

func (w *world) changeOf(c command.Command, read func(any)) (kind events.Aspect, ch change, err error) {
	meta := events.CommandMeta{CommandID: c.ID, Now: time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)}
	apply := func(ref events.Reference, tags []string, spec any, data func(events.Reference) events.Payload) change {
		ref.Version, err = definition.Digest(spec)
		return change{ref, versions.ApplyVersion{CommandMeta: meta, Version: ref.Version, Tags: tags, Data: data(ref)}, spec, nil}
	}
	remove := func(data func(events.Reference) events.Payload) change {
		var b command.RemoveEntry
		read(&b)
		return change{ref: b.Ref, command: versions.RemoveEntry{CommandMeta: meta, Version: b.Ref.Version, Data: data(b.Ref)}}
	}
	switch c.Type {
	case command.TypeApplyAgent:
		var b command.ApplyAgent
		read(&b)
		return events.Agent, apply(b.Ref, b.Tags, b.Spec, func(r events.Reference) events.Payload {
			return events.AgentApplied{Ref: r, Tags: b.Tags, Spec: b.Spec}
		}), err
	case command.TypeApplyInstance:
		var b command.ApplyInstance
		read(&b)
		return events.Instance, apply(b.Ref, b.Tags, b.Spec, func(r events.Reference) events.Payload {
			return events.InstanceApplied{Ref: r, Tags: b.Tags, Spec: b.Spec}
		}), err
	case command.TypeApplyEnvironment:
		var b command.ApplyEnvironment
		read(&b)
		for _, wrong := range definition.CheckEnvironment(b.Spec) {
			w.t.Errorf("an environment came as it may not be stored: %v", wrong)
		}
		return events.Environment, apply(b.Ref, b.Tags, b.Spec, func(r events.Reference) events.Payload {
			return events.EnvironmentApplied{Ref: r, Tags: b.Tags, Spec: b.Spec}
		}), err
	case command.TypeRemoveAgent:
		return events.Agent, remove(func(r events.Reference) events.Payload { return events.AgentRemoved{Ref: r} }), nil
	case command.TypeRemoveInstance:
		return events.Instance, remove(func(r events.Reference) events.Payload { return events.InstanceRemoved{Ref: r} }), nil
	case command.TypeRemoveEnvironment:
		return events.Environment, remove(func(r events.Reference) events.Payload { return events.EnvironmentRemoved{Ref: r} }), nil
	case command.TypePushSkill:
		var b command.PushSkill
		read(&b)
		ch, err = w.push(meta, b)
		return events.Skill, ch, err
	case command.TypeTagSkill:
		var b command.TagSkill
		read(&b)
		return events.Skill, change{ref: b.Ref, command: versions.MoveTag{CommandMeta: meta, Version: b.Ref.Version, Tag: b.Tag, Data: func(version string) events.Payload {
			b.Ref.Version = version
			return events.SkillTagged{Ref: b.Ref, Tag: b.Tag}
		}}}, nil
	case command.TypeRemoveSkill:
		return events.Skill, remove(func(r events.Reference) events.Payload { return events.SkillRemoved{Ref: r} }), nil
	}
	return "", ch, nil
}

// push checks and stores a ZIP, similar to the skills service.
func (w *world) push(meta events.CommandMeta, b command.PushSkill) (change, error) {
	bucket, err := w.js.ObjectStore(context.Background(), topology.BucketSkills)
	if err != nil {
		return change{}, err
	}
	content, err := bucket.GetBytes(context.Background(), b.Object)
	if err != nil {
		return change{}, err
	}
	z, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
	if err != nil {
		return change{}, &command.Error{Code: "SKILL_ZIP_INVALID", Field: "zip", Detail: "it is no ZIP"}
	}
	d := events.SkillPushed{Ref: b.Ref, Tags: b.Tags, Name: "pdf", Description: "reads PDFs", Document: "# PDF", Bytes: uint64(len(content)), UnpackedBytes: 5, Files: uint32(len(z.File))}
	if d.Ref.Slug == "" {
		d.Ref.Slug = d.Name
	}
	d.Ref.Version = b.SHA256
	ch := change{ref: d.Ref, pushed: &d}
	if b.DryRun {
		return ch, nil
	}
	if _, err := bucket.PutBytes(context.Background(), b.SHA256, content); err != nil {
		return change{}, err
	}
	ch.command = versions.ApplyVersion{CommandMeta: meta, Version: b.SHA256, Tags: b.Tags, Data: d}
	ch.spec = map[string]any{"name": d.Name, "description": d.Description, "bytes": d.Bytes, "unpackedBytes": d.UnpackedBytes, "files": d.Files}
	return ch, nil
}

// applyEntry decides a change and writes its rows, like the projector.
func (w *world) applyEntry(kind events.Aspect, tenant string, ch change) (command.Answer, error) {
	a := command.Answer{Ref: &ch.ref, Pushed: ch.pushed}
	if ch.command == nil {
		return a, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	subject := ch.ref.Subject(kind, tenant)
	if subject.Tenant != tenant {
		return a, fmt.Errorf("entry %s of tenant %s came as %s's", ch.ref, subject.Tenant, tenant)
	}
	state := w.entries[subject.ID]
	if state == nil {
		state = &versions.State{}
	}
	known := state.CommitSeqOf(ch.ref.Version) > 0
	list, err := versions.Decide(*state, ch.command)
	var refused *versions.Error
	if errors.As(err, &refused) {
		code := map[events.Aspect]string{events.Agent: "AGENT_NOT_FOUND", events.Instance: "INSTANCE_NOT_FOUND", events.Environment: "ENVIRONMENT_NOT_FOUND", events.Skill: "SKILL_NOT_FOUND"}[kind]
		return a, &command.Error{Code: code, Field: refused.Field, Detail: refused.Detail}
	}
	if err != nil {
		return a, err
	}
	a.Same = len(list) == 0 || known
	for _, e := range list {
		w.position++
		next := versions.Evolve(*state, e).WithCommitSeq(uint64(w.position))
		state = &next
		w.entries[subject.ID] = state
		if tagged, ok := e.Data.(events.SkillTagged); ok {
			ch.ref.Version = tagged.Ref.Version
		}
		w.writeEntry(kind, subject, ch, *state, e.Time)
	}
	a.Position = fmt.Sprint("0-", w.position)
	return a, nil
}

func (w *world) writeEntry(kind events.Aspect, subject events.Subject, ch change, state versions.State, at time.Time) {
	do := func(sql string, args ...any) {
		if _, err := w.pool.Exec(context.Background(), sql, args...); err != nil {
			w.t.Errorf("%s: %v", sql, err)
		}
	}
	scope, group := ch.ref.Scope, events.Partitioning(topology.DefaultPartitions).GroupOfID(subject.ID)
	if scope == "" {
		scope = events.ScopeOrganization
	}
	do(`INSERT INTO catalogue_entries VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $11)
		ON CONFLICT (tenant, id) DO UPDATE SET latest = $8, state = $9, removed = $10`, subject.Tenant, subject.ID, group, string(kind), string(scope), ch.ref.Org, ch.ref.Slug,
		state.Tags[events.LatestTag], string(encode(w.t, state)), state.Removed, at)
	if ch.spec != nil {
		document := ""
		if ch.pushed != nil {
			document = ch.pushed.Document
		}
		do("INSERT INTO catalogue_versions VALUES ($1, $2, $3, $4, $5, $6, $7, $8, false) ON CONFLICT (tenant, id, version) DO UPDATE SET removed = false", subject.Tenant, subject.ID,
			ch.ref.Version, group, string(encode(w.t, ch.spec)), document, at, fmt.Sprint("0-", w.position))
	}
	for _, v := range state.Versions {
		do("UPDATE catalogue_versions SET removed = $4 WHERE tenant = $1 AND id = $2 AND version = $3", subject.Tenant, subject.ID, v.Digest, v.Removed)
	}
	do("UPDATE checkpoints SET position = $2 WHERE grp = $1", group, w.position)
}

// sealer stores secrets unencrypted, so that tests can read them.
type sealer struct {
	w *world

	values map[string]string // by key
	fail   error
}

func (w *world) newSealer() *sealer {
	s := &sealer{w: w, values: map[string]string{}}
	w.sealer = s
	return s
}

func (s *sealer) Seal(_ context.Context, tenant, execution string, value []byte) (string, error) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	if s.fail != nil {
		return "", s.fail
	}
	key := fmt.Sprintf("%s.e.%d", tenant, len(s.values))
	if execution != "" {
		key = fmt.Sprintf("%s.x.%s.%d", tenant, execution, len(s.values))
	}
	s.values[key] = string(value)
	return key, nil
}

// bodyOf decodes the body of the last command of a type.
func (s *sessions) bodyOf(typ command.Type, into any) {
	s.w.t.Helper()
	for _, c := range s.commands(s.w.t) {
		if c.Type == typ {
			must(s.w.t, json.Unmarshal(c.Body, into))
		}
	}
}

// names returns the references in a list in order: scope, org, slug and tags.
func (a answer) names(field string) string {
	list, _ := a.field(field).([]any)
	var out []string
	for _, v := range list {
		one, _ := v.(map[string]any)
		ref, _ := one["ref"].(map[string]any)
		out = append(out, fmt.Sprint(ref["scope"], "/", ref["org"], "/", ref["slug"], " ", one["tags"]))
	}
	return strings.ReplaceAll(strings.Join(out, ";"), "<nil>", "")
}
