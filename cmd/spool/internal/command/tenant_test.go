package command

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
)

// serveTenant serves the budgets and limits of a tenant. requests returns the requests that were received.
func serveTenant(t *testing.T) (url string, requests func() []string) {
	t.Helper()
	var mu sync.Mutex
	var list []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		list = append(list, r.Method+" "+r.RequestURI+" "+string(body))
		mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		switch r.Method + " " + r.URL.Path {
		case "GET /api/budgets":
			fmt.Fprint(w, `{"budgets":[{"tenant":"acme","period":"month","budget":{"turns":0,"tokens":5000000,"costUsd":20,"timeMs":0},"spent":{"turns":3,"tokens":1234567,"costUsd":1.5,"timeMs":61500},"from":"2026-01-01","until":"2026-02-01T00:00:00Z","exceeded":""},`+
				`{"tenant":"acme","period":"total","budget":{"turns":2,"tokens":0,"costUsd":0,"timeMs":3600000},"spent":{"turns":2,"tokens":0,"costUsd":0,"timeMs":0},"from":"","exceeded":"2 of 2 turns"}]}`)
		case "GET /api/limits":
			fmt.Fprint(w, `{"tenant":"acme","limits":{"slots":4,"sandboxes":0,"sessions":0,"streams":7,"requestsPerSecond":2.5,"requestBurst":0,"keys":0,"eventsPerDay":0,"eventBytesPerDay":0,"storageBytes":1099511627776},`+
				`"used":{"slots":1,"sandboxes":2,"sessions":3,"streams":0,"requestsPerSecond":0,"requestBurst":0,"keys":4,"eventsPerDay":5000000,"eventBytesPerDay":6,"storageBytes":7}}`)
		default:
			fmt.Fprint(w, `{"tenant":"acme","position":"0-9","newer":1}`)
		}
	}))
	t.Cleanup(srv.Close)
	return srv.URL, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(list)
	}
}

func TestBudgetsAndLimits_PrintTables(t *testing.T) {
	t.Parallel()
	url, _ := serveTenant(t)
	budgets := "PERIOD  SINCE       DOLLARS            TOKENS              TURNS   TIME          USED UP\n" +
		"month   2026-01-01  1.5000 of 20.0000  1234567 of 5000000  3       1m1.5s        -\n" +
		"total   -           0.0000             0                   2 of 2  0s of 1h0m0s  2 of 2 turns\n"
	if got := spool(t, testIO(t), "budgets", "ls", "--url", url); got != (result{ExitDone, budgets, ""}) {
		t.Errorf("got\n%s%s", got.out, got.err)
	}
	limits := "LIMIT                OWN            USED\nslots                4              1\nsandboxes            -              2\nsessions             -              3\n" +
		"keys                 -              4\nevents-per-day       -              5000000\nevent-bytes-per-day  -              6\nstorage-bytes        1099511627776  7\n" +
		"streams              7              -\nrequests-per-second  2.5            -\nrequest-burst        -              -\n"
	if got := spool(t, testIO(t), "limits", "ls", "--url", url); got != (result{ExitDone, limits, ""}) {
		t.Errorf("got\n%s%s", got.out, got.err)
	}
}

func TestBudgetsAndLimits_SendChanges(t *testing.T) {
	t.Parallel()
	url, requests := serveTenant(t)
	for _, c := range []struct {
		args []string
		want result
	}{
		{[]string{"budgets", "set", "day", "--tokens", "5000000", "--time", "90m"}, result{ExitDone, "", "set\n"}},
		{[]string{"limits", "set", "--slots", "4", "--tenant", "acme"}, result{ExitDone, "", "set\n"}},
		{[]string{"budgets", "rm", "day", "month", "--tenant", "acme"}, result{ExitDone, "removed day\nremoved month\n", ""}},
		{[]string{"limits", "rm"}, result{ExitDone, "", "removed\n"}},
		{[]string{"limits", "rm", "--json"}, result{ExitDone, `{"tenant":"acme","position":"0-9","newer":1}` + "\n", ""}},
	} {
		if got := spool(t, testIO(t), append(c.args, "--url", url)...); got != c.want {
			t.Errorf("%v: got %+v", c.args, got)
		}
	}
	want := []string{
		`PUT /api/budgets/day {"budget":{"tokens":5000000,"timeMs":5400000}}`, `PUT /api/limits {"tenant":"acme","limits":{"slots":4}}`,
		"DELETE /api/budgets/day?tenant=acme ", "DELETE /api/budgets/month?tenant=acme ", "DELETE /api/limits ", "DELETE /api/limits ",
	}
	if got := requests(); !slices.Equal(got, want) {
		t.Errorf("requested %q\nwant      %q", got, want)
	}
}
