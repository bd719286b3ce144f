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

// foldAPIKey folds a commit about API keys into the rows of the keys.
func (f *batchFold) foldAPIKey(rec eventlog.Record) {
	if f.bare {
		return
	}
	for _, e := range rec.Events {
		k := RowKey{rec.Subject.Tenant, apiKeyID(e)}
		switch d := e.Data.(type) {
		case events.KeyCreated:
			if f.model.keys[k] == nil {
				f.model.keys[k] = &cachedRow[APIKey]{row: APIKey{
					Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Name: validText(d.Name), Prefix: validText(d.Prefix), SHA256: validRowID(d.SHA256), CreatedAt: postgresTime(e.Time),
					Role: validText(string(d.Rights.Role)), Agents: validText(strings.Join(d.Rights.Agents, ",")), CreatedBy: validRowID(d.CreatedBy),
				}}
				if at := d.Rights.ExpiresAt; !at.IsZero() {
					f.model.keys[k].row.ExpiresAt = postgresTimePointer(at)
				}
				markChanged(&f.keys, f.model.keys[k])
			}
		case events.KeyRevoked:
			if row := f.model.keys[k]; row != nil && row.row.RevokedAt == nil {
				markChanged(&f.keys, row).RevokedAt = postgresTimePointer(e.Time)
			}
		}
	}
}

// apiKeyID returns the row id of the API key that an event is about, or "" for another event.
func apiKeyID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.KeyCreated:
		return validRowID(d.KeyID)
	case events.KeyRevoked:
		return validRowID(d.KeyID)
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

// skillSpec is the JSON in CatalogueVersion.Spec for a version of a skill. It does not include the skill's document.
type skillSpec struct {
	Name          string `json:"name"`
	Description   string `json:"description"`
	Bytes         uint64 `json:"bytes"`
	UnpackedBytes uint64 `json:"unpackedBytes"`
	Files         uint32 `json:"files"`
}

// entryChangeOf returns the change that an event makes to a catalogue entry of a kind; ok is false if the event makes
// none.
func entryChangeOf(kind events.Aspect, e events.Event) (c entryChange, ok bool) {
	if known, found := events.LookupType(e.Type()); !found || known.Aspect != kind {
		return c, false
	}
	switch d := e.Data.(type) {
	case events.AgentApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags, d.Spec = canonicalReference(d.Ref), validRowIDs(d.Tags), events.AgentSpec{}
		c.ref, e.Data = d.Ref, d
	case events.InstanceApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags = canonicalReference(d.Ref), validRowIDs(d.Tags)
		c.ref, e.Data = d.Ref, d
	case events.EnvironmentApplied:
		c = entryChange{createsVersion: true, spec: d.Spec}
		d.Ref, d.Tags = canonicalReference(d.Ref), validRowIDs(d.Tags)
		c.ref, e.Data = d.Ref, d
	case events.SkillPushed:
		c = entryChange{createsVersion: true, document: d.Document, spec: skillSpec{d.Name, d.Description, d.Bytes, d.UnpackedBytes, d.Files}}
		d.Ref, d.Tags, d.Document = canonicalReference(d.Ref), validRowIDs(d.Tags), ""
		c.ref, e.Data = d.Ref, d
	case events.SkillTagged:
		d.Ref, d.Tag = canonicalReference(d.Ref), validRowID(d.Tag)
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

// canonicalReference returns the reference r with its scope in full. Its parts are valid as values of Postgres columns.
func canonicalReference(r events.Reference) events.Reference {
	if r.Scope == "" {
		r.Scope = events.ScopeOrganization
	}
	r.Scope, r.Org, r.Slug, r.Version = events.ReferenceScope(validRowID(string(r.Scope))), validRowID(r.Org), validRowID(r.Slug), validRowID(r.Version)
	return r
}

// validRowIDs returns each id of the list as validRowID returns it.
func validRowIDs(list []string) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = validRowID(s)
	}
	return out
}

// requestCatalogueRows requests the rows of the catalogue entry and the version that an event is about.
func (w *missingRowCollector) requestCatalogueRows(k RowKey, kind events.Aspect, e events.Event) {
	c, ok := entryChangeOf(kind, e)
	if !ok {
		return
	}
	if _, present := w.model.entries[k]; !present && !w.requested[requestedEntry(k)] {
		w.requested[requestedEntry(k)] = true
		w.out.Entries = append(w.out.Entries, k)
	}
	v := ChildKey{k, c.ref.Version}
	ref := requestedChild{v, childKindVersion}
	if _, present := w.model.versions[v]; !present && v.ID != "" && !w.requested[ref] {
		w.requested[ref] = true
		w.out.Versions = append(w.out.Versions, v)
	}
}

// requestedEntry is the key of a catalogue entry in the map missingRowCollector.requested. Its type distinguishes it
// from the keys of other rows.
type requestedEntry RowKey

// putCatalogueRows puts the catalogue entries and versions that Postgres has (p) into the model, as PutRows does. It
// records the other requested rows (asked) as not existing.
func (m *Model) putCatalogueRows(asked MissingRows, p FoundRows) error {
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
		m.entries[RowKey{r.Tenant, r.ID}] = &cachedRow[CatalogueEntry]{row: r, stored: true}
	}
	for _, r := range p.Versions {
		m.versions[ChildKey{RowKey{r.Tenant, r.Entry}, r.ID}] = &cachedRow[CatalogueVersion]{row: r, stored: true}
	}
	return nil
}

// foldCatalogue folds a commit about an agent, an instance, an environment or a skill into the rows of the entry and
// its versions.
func (f *batchFold) foldCatalogue(rec eventlog.Record) error {
	if f.bare {
		return nil
	}
	k := RowKey{rec.Subject.Tenant, rec.Subject.ID}
	f.changedUsageRow(k.Tenant, storedBytesDay).Stored += rec.Bytes
	for _, e := range rec.Events {
		c, ok := entryChangeOf(rec.Subject.Aspect, e)
		if !ok {
			continue
		}
		x := f.model.entries[k]
		if x == nil {
			x = &cachedRow[CatalogueEntry]{row: CatalogueEntry{
				Tenant: k.Tenant, ID: k.ID, Group: f.model.group, Kind: string(rec.Subject.Aspect),
				Scope: string(c.ref.Scope), Org: c.ref.Org, Slug: c.ref.Slug, CreatedAt: postgresTime(e.Time),
			}}
			f.model.entries[k] = x
		}
		row := markChanged(&f.entries, x)
		before := row.state
		row.state = versions.Evolve(before, c.event)
		row.Latest, row.Removed, row.UpdatedAt = row.state.Tags[events.LatestTag], row.state.Removed, postgresTime(e.Time)
		if err := f.foldVersion(ChildKey{k, c.ref.Version}, c, before, rec.Position.String()); err != nil {
			return err
		}
	}
	return nil
}

// foldVersion folds the change c of a catalogue entry into the row of the entry's version v. before is the state of the
// entry before the change.
func (f *batchFold) foldVersion(v ChildKey, c entryChange, before versions.State, position string) error {
	was, known := findVersion(before, v.ID)
	x := f.model.versions[v]
	switch {
	case v.ID == "":
	case c.createsVersion && (x == nil || !known || was.Removed): // created, or created again
		spec, err := marshalUnescaped(c.spec)
		if err != nil {
			return err
		}
		if x == nil {
			x = &cachedRow[CatalogueVersion]{}
			f.model.versions[v] = x
		} else if !x.row.Removed {
			f.changedUsageRow(v.Session.Tenant, storedBytesDay).Stored -= skillZIPBytes(x.row)
		}
		*markChanged(&f.versions, x) = CatalogueVersion{
			Tenant: v.Session.Tenant, Entry: v.Session.ID, ID: v.ID, Group: f.model.group,
			Spec: validText(spec), Document: validText(c.document), CreatedAt: postgresTime(c.event.Time), Position: position,
		}
		f.changedUsageRow(v.Session.Tenant, storedBytesDay).Stored += skillZIPBytes(x.row)
	case x != nil && known:
		if now, _ := findVersion(f.model.entries[v.Session].row.state, v.ID); now.Removed != x.row.Removed {
			markChanged(&f.versions, x).Removed = now.Removed
			if now.Removed {
				f.changedUsageRow(v.Session.Tenant, storedBytesDay).Stored -= skillZIPBytes(x.row)
			}
		}
	}
	return nil
}

// skillZIPBytes returns the size of the ZIP of a skill's version in bytes, or 0 for a version of another entry.
func skillZIPBytes(v CatalogueVersion) int64 {
	var spec skillSpec
	if v.Document == "" || json.Unmarshal([]byte(v.Spec), &spec) != nil { // only skills have a document; their spec was encoded by this fold
		return 0
	}
	return clampInt64(spec.Bytes)
}

// findVersion returns the version of a catalogue entry that has the digest. The bool is false if there is none.
func findVersion(s versions.State, digest string) (versions.Version, bool) {
	i := slices.IndexFunc(s.Versions, func(v versions.Version) bool { return v.Digest == digest })
	if i < 0 {
		return versions.Version{}, false
	}
	return s.Versions[i], true
}

// encodeEntryStates sets the field State of each changed catalogue entry to the JSON of the entry's state.
func encodeEntryStates(list []*cachedRow[CatalogueEntry]) error {
	for _, e := range list {
		text, err := marshalUnescaped(e.row.state)
		if err != nil {
			return err
		}
		e.row.State = validText(text)
	}
	return nil
}

// referencesJSON returns a list of references as a JSON array of strings, the value of a column.
func referencesJSON(list []events.Reference) string {
	out := make([]string, len(list))
	for i, r := range list {
		out[i] = validText(r.String())
	}
	text, _ := marshalUnescaped(out) // strings always encode
	return validText(text)
}

// resolutionJSON returns the JSON of an execution_resolved event, without values of secrets, as the value of a column.
func resolutionJSON(d events.ExecutionResolved) *string {
	d.Variables = slices.Clone(d.Variables)
	for i := range d.Variables {
		if d.Variables[i].Secret {
			d.Variables[i].Value = ""
		}
	}
	text, _ := marshalUnescaped(d) // strings always encode
	text = validText(text)
	return &text
}
