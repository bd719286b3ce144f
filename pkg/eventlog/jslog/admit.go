package jslog

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

// Role states whether a process reads or also writes the log, and which keys it has.
type Role int

const (
	// RoleVerifier is the role of a process that reads the log and checks the commits of all roles.
	RoleVerifier Role = iota
	// RoleWriter is the role of a process that also appends commits.
	RoleWriter
	// RoleContributor is the role of a process that appends commits, and has only the key of its own role.
	RoleContributor
)

// CheckSigning returns the signing settings that the installation recorded. It returns an error if the settings cannot
// be read, and the errors of CheckKeys.
func CheckSigning(ctx context.Context, js jetstream.JetStream, shards int, keys eventlog.Keys, use Role) (topology.SigningSettings, error) {
	s, err := topology.ReadSigning(ctx, js, shards)
	if err != nil {
		return s, err
	}
	return s, CheckKeys(s, keys, use)
}

// CheckKeys returns an error if keys do not match the signing settings of the installation: other processes would not
// accept commits that are signed with an unknown key. It also returns an error if this build cannot write commits of
// the version that the settings require.
func CheckKeys(s topology.SigningSettings, keys eventlog.Keys, use Role) error {
	if use != RoleVerifier && s.CommitVersion > events.CommitVersion {
		return fmt.Errorf("commit-version: writers of this log write commits of version %d, but this build supports only versions up to %d: run a newer build", s.CommitVersion, events.CommitVersion)
	}
	if len(s.Keys) == 0 {
		return nil
	}
	own := keys.SigningKey()
	switch {
	case keys.IsZero():
		return errors.New("log-keys: the commits of this log are signed: set the keys of the installation")
	case use != RoleVerifier && own == "":
		return errors.New("log-keys: the commits of this log are signed, but the keys do not contain the key of this service")
	case use != RoleVerifier && !slices.Contains(s.Keys, own):
		return fmt.Errorf("log-keys: the installation does not know the key %s: run `spool provision` with this key, or set the key that is in use", own)
	case use != RoleContributor && keys.MissingRole() != "":
		return fmt.Errorf("log-keys: the commits of this log are signed, but the keys contain no key of %s", keys.MissingRole())
	}
	return nil
}
