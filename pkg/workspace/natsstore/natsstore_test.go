package natsstore_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/natsstore"
	"github.com/spoolhq/spool/pkg/workspace/workspacetest"
)

func connect(t *testing.T) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(natstest.Conn(t, natstest.Run(t)))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func TestStore(t *testing.T) {
	t.Parallel()
	workspacetest.Exercise(t, func(t *testing.T) workspace.Store {
		js := connect(t)
		if err := topology.Provision(t.Context(), js, topology.Config{}); err != nil {
			t.Fatal(err)
		}
		s, err := natsstore.Open(t.Context(), js, topology.BucketWorkspaces)
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestNoBucket(t *testing.T) {
	t.Parallel()
	_, err := natsstore.Open(t.Context(), connect(t), topology.BucketWorkspaces)
	if err == nil || !strings.Contains(err.Error(), "object bucket workspaces is not installed") {
		t.Errorf("open: %v", err)
	}
}
