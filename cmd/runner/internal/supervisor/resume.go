package supervisor

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/runner"
)

// agentSessions stores, in the state folder, the agent's own id of each session's conversation, so that a new process
// can resume the conversation if the query does not name it. Query.Resume takes precedence.
type agentSessions struct {
	path string
	log  *slog.Logger
	ids  map[string]string // by architecture and session
}

// loadAgentSessions reads the stored ids from the state folder. It only logs an error, and then returns none.
func loadAgentSessions(state string, log *slog.Logger) *agentSessions {
	r := &agentSessions{path: filepath.Join(state, "agent-sessions.json"), log: log, ids: map[string]string{}}
	raw, err := os.ReadFile(r.path)
	if err == nil {
		err = json.Unmarshal(raw, &r.ids)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Error("read which agent sessions there were", "err", err)
	}
	return r
}

// agentSessionOf returns the agent's own session id for the session of a query, "" if none is stored.
func (r *agentSessions) agentSessionOf(q runner.Query) string {
	return r.ids[q.Architecture+"/"+q.SessionID]
}

// setAgentSession stores the agent's own session id for the session of a query. It only logs an error.
func (r *agentSessions) setAgentSession(q runner.Query, id string) {
	key := q.Architecture + "/" + q.SessionID
	if r.ids[key] == id {
		return
	}
	r.ids[key] = id
	raw, err := json.Marshal(r.ids)
	if err == nil {
		tmp := r.path + ".new"
		if err = os.WriteFile(tmp, raw, 0o600); err == nil {
			err = os.Rename(tmp, r.path)
		}
	}
	if err != nil {
		r.log.Error("remember the agent's session", "err", err)
	}
}
