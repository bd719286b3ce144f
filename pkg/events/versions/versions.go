// Package versions decides the commands on a catalogue entry and folds its events: its versions, which never
// change, and the tags that name them. It is pure.
package versions

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// StateVersion is the version of State as stored with each commit. A stored state of another version is ignored, and
// the subject is folded from its first commit.
const StateVersion = 1

// Limits of a State, which is stored in every commit of the entry.
const (
	// MaxVersions is the maximum number of versions in a State. Older versions are found by reading the commits of the
	// entry.
	MaxVersions = 256
	// MaxTags is the maximum number of tags of an entry.
	MaxTags = 64

	// maxRememberedCommands is the maximum number of commands of an entry that a State remembers.
	maxRememberedCommands = 16
)

// State is the state of a catalogue entry: its versions and tags, folded from the entry's commits.
type State struct {
	V        int               `json:"v"`
	Removed  bool              `json:"removed,omitempty"`
	Versions []Version         `json:"versions,omitempty"` // oldest first
	Dropped  bool              `json:"dropped,omitempty"`  // older versions were removed from Versions
	Tags     map[string]string `json:"tags,omitempty"`     // version by tag, including latest
	Commands []string          `json:"commands,omitempty"` // ids of the most recent commits, so that a redelivered command changes nothing
}

// Version is a version of a catalogue entry, and the stream sequence of the commit with its content.
type Version struct {
	Digest  string `json:"digest"`
	At      uint64 `json:"at,omitempty"` // stream sequence of the commit that contains the version; 0 means the current commit
	Removed bool   `json:"removed,omitempty"`
}

// Error is returned for a command on a catalogue entry that is refused.
type Error struct{ Code, Field, Detail string }

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

// The codes of Error.
const (
	CodeNotFound    = "NOT_FOUND"
	CodeTooManyTags = "TOO_MANY_TAGS"
)

// Command is a command on a catalogue entry: ApplyVersion, MoveTag or RemoveEntry.
type Command interface{ sealed() }

// ApplyVersion is the command that adds a version to a catalogue entry. If the version exists, it moves the tags to it.
type ApplyVersion struct {
	events.CommandMeta
	Version string
	Tags    []string       // in addition to latest
	Data    events.Payload // AgentApplied, InstanceApplied, EnvironmentApplied or SkillPushed
	// OnlyFirst adds the version only if the entry has none, so that a default does not replace a version of a
	// client.
	OnlyFirst bool
}

// MoveTag is the command that moves a tag to an existing version of a catalogue entry.
type MoveTag struct {
	events.CommandMeta
	Version string // a digest, or a tag
	Tag     string
	Data    func(version string) events.Payload
}

// RemoveEntry is the command that hides a catalogue entry, or one version of it.
type RemoveEntry struct {
	events.CommandMeta
	Version string // "" for the entry
	Data    events.Payload
}

func (ApplyVersion) sealed() {}
func (MoveTag) sealed()      {}
func (RemoveEntry) sealed()  {}

// Decide returns the events that a command causes, or none if it changes nothing.
func Decide(s State, c Command) ([]events.Event, error) {
	switch c := c.(type) {
	case ApplyVersion:
		if s.hasVersionAndTags(c.Version, c.Tags) {
			return nil, nil
		}
		if _, has := s.Resolve(events.LatestTag); has && c.OnlyFirst {
			return nil, nil
		}
		if err := s.checkTags(c.Tags...); err != nil {
			return nil, err
		}
		return newEvents(c.CommandMeta, c.Data), nil
	case MoveTag:
		digest, ok := s.Resolve(c.Version)
		if v, known := s.findVersion(digest); !ok || !known || v.Removed || s.Removed { // the state cannot tell whether a version exists that was dropped from it
			return nil, newNotFoundError(c.Version)
		}
		if s.Tags[c.Tag] == digest {
			return nil, nil
		}
		if err := s.checkTags(c.Tag); err != nil {
			return nil, err
		}
		return newEvents(c.CommandMeta, c.Data(digest)), nil
	case RemoveEntry:
		if c.Version != "" {
			if v, ok := s.findVersion(c.Version); !ok || v.Removed {
				return nil, newNotFoundError(c.Version)
			}
		} else if s.Removed || len(s.Versions) == 0 {
			return nil, &Error{CodeNotFound, "slug", "there is no such entry"}
		}
		return newEvents(c.CommandMeta, c.Data), nil
	}
	return nil, fmt.Errorf("versions: there is no command %T", c)
}

// newEvents returns a list of one event with the given data, whose id is derived from the command.
func newEvents(meta events.CommandMeta, data events.Payload) []events.Event {
	m := events.NewEventList(meta)
	m.Add("", data)
	return m.Events()
}

// newNotFoundError returns the error for a version that the entry does not have.
func newNotFoundError(version string) error {
	return &Error{CodeNotFound, "version", fmt.Sprintf("there is no version %.64q", version)}
}

// hasVersionAndTags reports whether version is the latest one and has all tags, so that applying it changes nothing.
func (s State) hasVersionAndTags(version string, tags []string) bool {
	if s.Removed || s.Tags[events.LatestTag] != version {
		return false
	}
	return !slices.ContainsFunc(tags, func(t string) bool { return s.Tags[t] != version })
}

// checkTags returns an error if the tags would exceed MaxTags. Every entry has the tag latest.
func (s State) checkTags(tags ...string) error {
	all := maps.Clone(s.Tags)
	if all == nil {
		all = map[string]string{}
	}
	for _, t := range append([]string{events.LatestTag}, tags...) {
		all[t] = ""
	}
	if len(all) > MaxTags {
		return &Error{CodeTooManyTags, "tags", fmt.Sprintf("an entry has at most %d tags, with latest; give one that it has", MaxTags)}
	}
	return nil
}

// Resolve returns the digest of a version of a reference: "" or latest, a tag, or a digest. If older versions were
// dropped, Resolve accepts an unknown digest, and the caller has to look for it in the chain.
func (s State) Resolve(version string) (digest string, ok bool) {
	if s.Removed && !events.IsDigest(version) {
		return "", false
	}
	if version == "" {
		version = events.LatestTag
	}
	if d, tagged := s.Tags[version]; tagged {
		return d, true
	}
	if !events.IsDigest(version) {
		return "", false
	}
	if v, found := s.findVersion(version); found {
		return version, !v.Removed
	}
	return version, s.Dropped
}

// CommitSeqOf returns the stream sequence of the commit that created the version with a digest, or 0 if the caller has
// to look for it in the chain.
func (s State) CommitSeqOf(digest string) uint64 {
	v, _ := s.findVersion(digest)
	return v.At
}

// findVersion returns the version with a digest, and whether the state has it.
func (s State) findVersion(digest string) (Version, bool) {
	i := slices.IndexFunc(s.Versions, func(v Version) bool { return v.Digest == digest })
	if i < 0 {
		return Version{}, false
	}
	return s.Versions[i], true
}

// HasCommand reports whether the commit of a command is among the most recent ones of the entry.
func (s State) HasCommand(commit string) bool { return slices.Contains(s.Commands, commit) }

// WithCommitSeq returns the state after its commit was stored: references to the commit have its stream sequence, seq,
// instead of 0.
func (s State) WithCommitSeq(seq uint64) State {
	s.Versions = slices.Clone(s.Versions)
	for i := range s.Versions {
		if s.Versions[i].At == 0 {
			s.Versions[i].At = seq
		}
	}
	return s
}

// MayHaveDropped reports whether a command that HasCommand does not find may have been carried out nevertheless.
func (s State) MayHaveDropped() bool { return len(s.Commands) >= maxRememberedCommands }

// Fold applies a commit's events and remembers the commit.
func Fold(s State, commit string, list []events.Event) State {
	for _, e := range list {
		s = Evolve(s, e)
	}
	s.Commands = append(slices.Clone(s.Commands), commit)
	if extra := len(s.Commands) - maxRememberedCommands; extra > 0 {
		s.Commands = s.Commands[extra:]
	}
	return s
}

// Evolve returns the state after an event. It never fails: an unknown event changes nothing.
func Evolve(s State, e events.Event) State {
	s.V = StateVersion
	switch d := e.Data.(type) {
	case events.AgentApplied:
		return s.withVersion(d.Ref.Version, d.Tags)
	case events.InstanceApplied:
		return s.withVersion(d.Ref.Version, d.Tags)
	case events.EnvironmentApplied:
		return s.withVersion(d.Ref.Version, d.Tags)
	case events.SkillPushed:
		return s.withVersion(d.Ref.Version, d.Tags)
	case events.SkillTagged:
		return s.withTag(d.Ref.Version, d.Tag)
	case events.AgentRemoved:
		return s.withoutVersion(d.Ref.Version)
	case events.InstanceRemoved:
		return s.withoutVersion(d.Ref.Version)
	case events.EnvironmentRemoved:
		return s.withoutVersion(d.Ref.Version)
	case events.SkillRemoved:
		return s.withoutVersion(d.Ref.Version)
	}
	return s
}

// withVersion returns the state in which a version is the latest one. A known version keeps its position, unless it
// was removed: then this commit restores it.
func (s State) withVersion(digest string, tags []string) State {
	s.Removed = false
	if v, ok := s.findVersion(digest); !ok || v.Removed {
		s.Versions = slices.DeleteFunc(slices.Clone(s.Versions), func(v Version) bool { return v.Digest == digest })
		s.Versions = append(s.Versions, Version{Digest: digest})
	}
	s = s.withTag(digest, events.LatestTag)
	for _, t := range tags {
		s = s.withTag(digest, t)
	}
	return s.dropOldest()
}

// dropOldest drops the oldest untagged versions beyond MaxVersions.
func (s State) dropOldest() State {
	for extra := len(s.Versions) - MaxVersions; extra > 0; extra-- {
		i := slices.IndexFunc(s.Versions, func(v Version) bool {
			return !slices.Contains(slices.Collect(maps.Values(s.Tags)), v.Digest)
		})
		if i < 0 { // unreachable: MaxTags is less than MaxVersions
			return s
		}
		s.Versions, s.Dropped = slices.Delete(slices.Clone(s.Versions), i, i+1), true
	}
	return s
}

// withTag returns the state in which a tag names a version.
func (s State) withTag(digest, tag string) State {
	s.Tags = maps.Clone(s.Tags)
	if s.Tags == nil {
		s.Tags = map[string]string{}
	}
	s.Tags[tag] = digest
	return s
}

// withoutVersion hides one version and its tags, or the entry if digest is "". If the version was the latest one, latest
// moves to the newest remaining version.
func (s State) withoutVersion(digest string) State {
	if digest == "" {
		s.Removed, s.Tags = true, nil
		return s
	}
	s.Versions = slices.Clone(s.Versions)
	newest := ""
	for i := range s.Versions {
		v := &s.Versions[i]
		v.Removed = v.Removed || v.Digest == digest
		if !v.Removed {
			newest = v.Digest
		}
	}
	latest := s.Tags[events.LatestTag] == digest
	s.Tags = maps.Clone(s.Tags)
	maps.DeleteFunc(s.Tags, func(_, d string) bool { return d == digest })
	switch {
	case newest == "":
		s.Removed = true
	case latest:
		s.Tags[events.LatestTag] = newest
	}
	return s
}
