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

// Use is what a process does with the log.
type Use int

// A Verifier reads commits of all roles and checks them. A Writer appends as well. A Contributor appends, and holds its own role's key alone.
const (
	Verifier Use = iota
	Writer
	Contributor
)

// Signing reads what the installation recorded of signed commits, and reports keys that do not fit it: a process that signed with another key
// would write what nobody else takes for a part of the log.
func Signing(ctx context.Context, js jetstream.JetStream, shards int, keys eventlog.Keys, use Use) (topology.Signing, error) {
	s, err := topology.ReadSigning(ctx, js, shards)
	if err == nil && use != Verifier && s.CommitVersion > events.CommitVersion {
		err = fmt.Errorf("commit-version: writers of this log write commits of version %d, and this build knows versions up to %d: run a newer build", s.CommitVersion, events.CommitVersion)
	}
	if err != nil || len(s.Keys) == 0 {
		return s, err
	}
	own := keys.SigningKey()
	switch {
	case keys.IsZero():
		return s, errors.New("log-keys: the commits of this log are signed: set the keys of the installation")
	case use != Verifier && own == "":
		return s, errors.New("log-keys: the commits of this log are signed, and the key of this service is not among the keys")
	case use != Verifier && !slices.Contains(s.Keys, own):
		return s, fmt.Errorf("log-keys: the installation does not know the key %s: run `spool provision` with it, or set the key that is in use", own)
	case use != Contributor && keys.Missing() != "":
		return s, fmt.Errorf("log-keys: the commits of this log are signed, and no key of %s is among the keys", keys.Missing())
	}
	return s, nil
}
