package compose

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// erase deletes a session and waits until the installation's janitor has removed its content: the files of NATS no
// longer contain it, and still contain that of another session.
func (p *project) erase(gateways []server) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Minute)
	defer cancel()
	const gone, kept = "heron-erased-5530", "osprey-kept-8841"
	ids := map[string]string{}
	for _, marker := range []string{gone, kept} {
		var made struct{ SessionID string }
		if err := gateways[0].call(ctx, "POST", "/api/sessions", map[string]any{"architecture": "spool"}, http.StatusCreated, &made); err != nil {
			p.t.Fatal(err)
		}
		ids[marker] = made.SessionID
		var accepted struct{ ExecutionID string }
		if err := gateways[0].call(ctx, "POST", "/api/sessions/"+made.SessionID+"/messages", map[string]any{"content": "Remember the code word " + marker + "."}, http.StatusAccepted, &accepted); err != nil {
			p.t.Fatal(err)
		}
		p.await("the turn of "+marker+" has ended", 2*time.Minute, func() error {
			var x struct{ Phase string }
			err := gateways[1].call(ctx, "GET", "/api/executions/"+accepted.ExecutionID, nil, http.StatusOK, &x)
			if err == nil && x.Phase != "completed" {
				err = fmt.Errorf("the execution is %s", x.Phase)
			}
			return err
		})
		if !p.storeContains(marker) {
			p.t.Fatalf("%s is not in the files of NATS, so the search proves nothing", marker)
		}
	}
	if err := gateways[1].call(ctx, "DELETE", "/api/sessions/"+ids[gone], nil, http.StatusOK, nil); err != nil {
		p.t.Fatal(err)
	}
	began := time.Now()
	p.await("the janitor has removed the content", 3*time.Minute, func() error {
		removed := p.run(time.Minute, p.compose("exec", "--no-TTY", "postgres", "psql", "--username=spool", "--tuples-only", "--no-align",
			"--command", "SELECT removed FROM spool.deleted_sessions WHERE id = '"+ids[gone]+"'")...)
		if strings.TrimSpace(removed) != "t" {
			return fmt.Errorf("removed is %q", strings.TrimSpace(removed))
		}
		return nil
	})
	if p.storeContains(gone) {
		p.t.Errorf("%s is still in the files of NATS", gone)
	}
	if !p.storeContains(kept) {
		p.t.Errorf("%s is no longer in the files of NATS", kept)
	}
	p.t.Logf("the content of a deleted session was removed in %s", time.Since(began).Round(time.Second))
}

// storeContains reports whether a file in the volume of NATS contains a text. It leaves out text in flight, which ends
// by age.
func (p *project) storeContains(text string) bool {
	p.t.Helper()
	out, err := p.try(time.Minute, p.compose("exec", "--no-TTY", "nats", "sh", "-c", "{ grep -rlF -- "+text+" /data || test $? = 1; } | { grep -v /streams/DELTAS/ || true; }")...)
	if err != nil {
		p.t.Fatal(err)
	}
	return strings.TrimSpace(out) != ""
}
