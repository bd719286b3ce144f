package fold

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/versions"
)

// foldKey folds a commit about API keys.
func (f *folding) foldKey(rec eventlog.Record) {
	if f.bare {
		return
	}
	for _, e := range rec.Events {
		k := Key{rec.Subject.Tenant, keyID(e)}
		switch d := e.Data.(type) {
		case events.KeyCreated:
			if f.model.keys[k] == nil {
				f.model.keys[k] = &entry[APIKey]{row: APIKey{
					Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Name: clean(d.Name), Prefix: clean(d.Prefix), SHA256: rowKey(d.SHA256), CreatedAt: pgTime(e.Time),
					Role: clean(string(d.Rights.Role)), Agents: clean(strings.Join(d.Rights.Agents, ",")), CreatedBy: rowKey(d.CreatedBy),
				}}
				if at := d.Rights.ExpiresAt; !at.IsZero() {
					f.model.keys[k].row.ExpiresAt = pgTimePointer(at)
				}
				markChanged(&f.keys, f.model.keys[k])
			}
		case events.KeyRevoked:
			if row := f.model.keys[k]; row != nil && row.row.RevokedAt == nil {
				markChanged(&f.keys, row).RevokedAt = pgTimePointer(e.Time)
			}
		}
	}
}

// keyID returns the row key of the API key that an event is about, or "".
func keyID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.KeyCreated:
		return rowKey(d.KeyID)
	case events.KeyRevoked:
		return rowKey(d.KeyID)
	}
	return ""
}

// entryChange is the change of a catalogue entry, or of one of its versions, that an event describes.
type entryChange struct {
	ref            events.Reference // the entry and its version, as valid row values
	event          events.Event     // the event with the same row values, for versions.Evolve
	createsVersion bool             // whether the event creates a version, whose content follows
	spec           any
	document       string
}

// skillSpec is the JSON of Version.Spec for a version of a skill. It does not include the skill's document.
type skillSpec struct {
	Name          string `json:"name"`
	Description   string `json:"description"`
	Bytes         uint64 `json:"bytes"`
	UnpackedBytes uint64 `json:"unpackedBytes"`
	Files         uint32 `json:"files"`
}

// entryChangeOf returns the change of an entry of a kind that an event describes; ok is false if the event describes none.
func entryChangeOf(kind events.Aspect, e events.Event) (c entryChange, ok bool) {
	if known, found := events.LookupType(e.Type()); !found || known.Aspect != kind {
		return c, false
	}
	switch d := e.Data.(type) {
	case events.AgentApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags, d.Spec = canonicalReference(d.Ref), rowKeys(d.Tags), events.AgentSpec{}
		c.ref, e.Data = d.Ref, d
	case events.InstanceApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags = canonicalReference(d.Ref), rowKeys(d.Tags)
		c.ref, e.Data = d.Ref, d
	case events.EnvironmentApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags = canonicalReference(d.Ref), rowKeys(d.Tags)
		c.ref, e.Data = d.Ref, d
	case events.SkillPushed:
		c = entryChange{createsVersion: true, document: d.Document, spec: skillSpec{d.Name, d.Description, d.Bytes, d.UnpackedBytes, d.Files}}
		d.Ref, d.Tags, d.Document = canonicalReference(d.Ref), rowKeys(d.Tags), ""
		c.ref, e.Data = d.Ref, d
	case events.SkillTagged:
		d.Ref, d.Tag = canonicalReference(d.Ref), rowKey(d.Tag)
		c.ref, e.Data = d.Ref, d
	case events.AgentRemoved:
		d.Ref = canonicalReference(d.Ref)
		c.ref, e.Data = d.Ref, d
	case events.InstanceRemoved:
		d.Ref = canonicalReference(d.Ref)
		c.ref, e.Data = d.Ref, d
	case events.EnvironmentRemoved:
		d.Ref = canonicalReference(d.Ref)
		c.ref, e.Data = d.Ref, d
	case events.SkillRemoved:
		d.Ref = canonicalReference(d.Ref)
		c.ref, e.Data = d.Ref, d
	default:
		return c, false // its data could not be decoded
	}
	c.event = e
	return c, true
}

// canonicalReference returns r with parts that are valid row values, and with its scope in full.
func canonicalReference(r events.Reference) events.Reference {
	if r.Scope == "" {
		r.Scope = events.ScopeOrganization
	}
	r.Scope, r.Org, r.Slug, r.Version = events.ReferenceScope(rowKey(string(r.Scope))), rowKey(r.Org), rowKey(r.Slug), rowKey(r.Version)
	return r
}

// rowKeys returns the row keys of a list of ids.
func rowKeys(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = rowKey(s)
	}
	return out
}

// requestEntry requests the rows that an event of the catalogue is about.
func (w *lookup) requestEntry(k Key, kind events.Aspect, e events.Event) {
	c, ok := entryChangeOf(kind, e)
	if !ok {
		return
	}
	if _, present := w.model.entries[k]; !present && !w.seen[entryRef(k)] {
		w.seen[entryRef(k)] = true
		w.out.Entries = append(w.out.Entries, k)
	}
	v := Child{k, c.ref.Version}
	ref := childRef{v, childVersion}
	if _, present := w.model.versions[v]; !present && v.ID != "" && !w.seen[ref] {
		w.seen[ref] = true
		w.out.Versions = append(w.out.Versions, v)
	}
}

// entryRef is the key of a catalogue entry in the map lookup.seen. Its type keeps it apart from the keys of other rows.
type entryRef Key

// putEntries puts the entries of the catalogue and their versions into the model, as Put does. A requested row that p does not have is
// recorded as not existing.
func (m *Model) putEntries(asked Missing, p Present) error {
	for _, k := range asked.Entries {
		m.entries[k] = nil
	}
	for _, v := range asked.Versions {
		m.versions[v] = nil
	}
	for _, r := range p.Entries {
		if err := json.Unmarshal([]byte(r.State), &r.state); err != nil {
			return fmt.Errorf("decode stored catalogue entry %s: %w", r.ID, err)
		}
		m.entries[Key{r.Tenant, r.ID}] = &entry[Entry]{row: r, stored: true}
	}
	for _, r := range p.Versions {
		m.versions[Child{Key{r.Tenant, r.Entry}, r.ID}] = &entry[Version]{row: r, stored: true}
	}
	return nil
}

// foldCatalogue folds a commit about an agent, an instance, an environment or a skill.
func (f *folding) foldCatalogue(rec eventlog.Record) error {
	if f.bare {
		return nil
	}
	k := Key{rec.Subject.Tenant, rec.Subject.ID}
	f.usageRow(k.Tenant, noDay).Stored += rec.Bytes
	for _, e := range rec.Events {
		c, ok := entryChangeOf(rec.Subject.Aspect, e)
		if !ok {
			continue
		}
		x := f.model.entries[k]
		if x == nil {
			x = &entry[Entry]{row: Entry{
				Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Kind: string(rec.Subject.Aspect),
				Scope: string(c.ref.Scope), Org: c.ref.Org, Slug: c.ref.Slug, CreatedAt: pgTime(e.Time),
			}}
			f.model.entries[k] = x
		}
		row := markChanged(&f.entries, x)
		before := row.state
		row.state = versions.Evolve(before, c.event)
		row.Latest, row.Removed, row.UpdatedAt = row.state.Tags[events.LatestTag], row.state.Removed, pgTime(e.Time)
		if err := f.foldVersion(Child{k, c.ref.Version}, c, before, rec.Position.String()); err != nil {
			return err
		}
	}
	return nil
}

// foldVersion folds the change c into the row of the version v. before is the state of the entry before the change.
func (f *folding) foldVersion(v Child, c entryChange, before versions.State, position string) error {
	was, known := find(before, v.ID)
	x := f.model.versions[v]
	switch {
	case v.ID == "":
	case c.createsVersion && (x == nil || !known || was.Removed): // created, or created again
		spec, err := marshal(c.spec)
		if err != nil {
			return err
		}
		if x == nil {
			x = &entry[Version]{}
			f.model.versions[v] = x
		} else if !x.row.Removed {
			f.usageRow(v.Session.Tenant, noDay).Stored -= zipBytes(x.row)
		}
		*markChanged(&f.versions, x) = Version{
			Tenant: v.Session.Tenant, Entry: v.Session.ID, ID: v.ID, Group: f.model.group,
			Spec: clean(spec), Document: clean(c.document), CreatedAt: pgTime(c.event.Time), Position: position,
		}
		f.usageRow(v.Session.Tenant, noDay).Stored += zipBytes(x.row)
	case x != nil && known:
		if now, _ := find(f.model.entries[v.Session].row.state, v.ID); now.Removed != x.row.Removed {
			markChanged(&f.versions, x).Removed = now.Removed
			if now.Removed {
				f.usageRow(v.Session.Tenant, noDay).Stored -= zipBytes(x.row)
			}
		}
	}
	return nil
}

// zipBytes returns the size of the ZIP of a skill's version; 0 for other entries.
func zipBytes(v Version) int64 {
	var spec skillSpec
	if v.Document == "" || json.Unmarshal([]byte(v.Spec), &spec) != nil { // only skills have a document; their spec was encoded by this fold
		return 0
	}
	return clampInt64(spec.Bytes)
}

// find returns the version of an entry with a digest. The bool is false if there is none.
func find(s versions.State, digest string) (versions.Version, bool) {
	i := slices.IndexFunc(s.Versions, func(v versions.Version) bool { return v.Digest == digest })
	if i < 0 {
		return versions.Version{}, false
	}
	return s.Versions[i], true
}

// encodeStates sets the JSON of the state of the changed catalogue entries.
func encodeStates(list []*entry[Entry]) error {
	for _, e := range list {
		text, err := marshal(e.row.state)
		if err != nil {
			return err
		}
		e.row.State = clean(text)
	}
	return nil
}

// referencesValue returns the row value of a list: JSON of strings.
func referencesValue(list []events.Reference) string {
	out := make([]string, len(list))
	for i, r := range list {
		out[i] = clean(r.String())
	}
	text, _ := marshal(out) // strings always encode
	return clean(text)
}

// resolvedValue returns the row value of an execution_resolved event, without values of secrets.
func resolvedValue(d events.ExecutionResolved) *string {
	d.Variables = slices.Clone(d.Variables)
	for i := range d.Variables {
		if d.Variables[i].Secret {
			d.Variables[i].Value = ""
		}
	}
	text, _ := marshal(d) // strings always encode
	text = clean(text)
	return &text
}
