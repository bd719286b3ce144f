package gateway_test

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway"
)

// item is an entry of a list: a session, and its only execution.
type item struct {
	session, execution, agent, ref, architecture, status, phase, metadata, title, result string
	created, updated, ended                                                              time.Time
}

const (
	digestA = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	digestB = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
)

// createItems creates sessions that differ in everything that lists can filter by. Many have equal times.
func (w *world) createItems(tenant string, n int) []item {
	w.t.Helper()
	pick := func(list []string, i int) string { return list[i%len(list)] }
	base := time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)
	var out []item
	for i := range n {
		it := item{
			session: oldID(w.t, events.KindSession), execution: oldID(w.t, events.KindExecution),
			ref:          pick([]string{"", "reviewer@" + digestA, "reviewer@" + digestB, "acme/reviewer@" + digestA, "platform/helper@" + digestA}, i),
			architecture: pick([]string{"spool", "codex", "claude-code"}, i), status: pick([]string{"open", "open", "closed"}, i/2),
			phase:    pick([]string{"completed", "failed", "running", "completed"}, i),
			metadata: pick([]string{"", `{"team":"red","n":1}`, `{"team":"blue","n":10,"deep":{"a":[1]}}`, `["team"]`, `{"zero\u0000":"a\u0000b","team":null,"on":true}`}, i/3),
			title:    pick([]string{"Look at the LOG", "100% of it_all", "été à Paris", ""}, i), result: pick([]string{"done", "Nothing found"}, i),
			created: base.Add(time.Duration(i/3) * 17 * time.Second), updated: base.Add(time.Duration(i*7%n/2) * 13 * time.Second), ended: base.Add(time.Duration(i*5%n/2) * time.Hour),
		}
		it.agent = "default"
		if it.ref != "" {
			path, _, _ := strings.Cut(it.ref, "@")
			it.agent = path[strings.LastIndex(path, "/")+1:]
		}
		var metadata *string
		if it.metadata != "" {
			metadata = &it.metadata
		}
		w.exec(`INSERT INTO sessions (tenant, id, grp, status, agent, agent_version, architecture, provider, options, metadata, created_at, updated_at, tip, tip_position, agent_ref, title)
			VALUES ($1, $2, 0, $3, $4, '1', $5, 'local', '{}', $6, $7, $8, 1, '0-1', $9, $10)`,
			tenant, it.session, it.status, it.agent, it.architecture, metadata, it.created, it.updated, it.ref, it.title)
		w.exec(`INSERT INTO executions (tenant, session, id, ord, phase, metadata, queued_at, ended_at, first_seq, query, result) VALUES ($1, $2, $3, 0, $4, $5, $6, $7, 2, $8, $9)`,
			tenant, it.session, it.execution, it.phase, metadata, it.created, it.ended, it.title, it.result)
		out = append(out, it)
	}
	return out
}

// all reads a list page by page and returns its ids.
func (s *served) all(route, query string, size int) []string {
	s.t.Helper()
	ids, token := []string{}, ""
	for {
		a := s.get(fmt.Sprintf("/api/%s?pageSize=%d&%s&pageToken=%s", route, size, query, token)).want(s.t, 200)
		list, _ := a.field(route).([]any)
		for _, row := range list {
			id, _ := row.(map[string]any)[strings.TrimSuffix(route, "s")+"Id"].(string)
			ids = append(ids, id)
		}
		if token = a.text("nextPageToken"); token == "" {
			return ids
		}
		if len(list) != size {
			s.t.Fatalf("%s %s: a page has %d rows and a next one", route, query, len(list))
		}
	}
}

func TestLists_FilterAndSort(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	items := w.createItems("default", 60)
	w.createItems("other", 20)
	stamp := func(t time.Time) string { return url.QueryEscape(t.Format(time.RFC3339)) }
	mid := items[30].created
	updated := func(route string, it item) time.Time {
		switch {
		case route == "sessions":
			return it.updated
		case it.ended.After(it.created):
			return it.ended
		}
		return it.created
	}
	for query, keep := range map[string]func(route string, it item) bool{
		"":                            func(string, item) bool { return true },
		"agent=default":               func(_ string, it item) bool { return it.ref == "" },
		"agent=reviewer":              func(_ string, it item) bool { return strings.HasPrefix(it.ref, "reviewer@") },
		"agent=reviewer%40" + digestB: func(_ string, it item) bool { return it.ref == "reviewer@"+digestB },
		"agent=acme/reviewer":         func(_ string, it item) bool { return strings.HasPrefix(it.ref, "acme/") },
		"agent=platform/helper":       func(_ string, it item) bool { return strings.HasPrefix(it.ref, "platform/") },
		"architecture=claude-sdk":     func(_ string, it item) bool { return it.architecture == "claude-code" },
		"architecture=codex&agent=reviewer": func(_ string, it item) bool {
			return it.architecture == "codex" && strings.HasPrefix(it.ref, "reviewer@")
		},
		"metadataKey=team":                                               func(_ string, it item) bool { return strings.HasPrefix(it.metadata, "{") },
		"metadataKey=team&metadataValue=blue":                            func(_ string, it item) bool { return strings.Contains(it.metadata, `"blue"`) },
		"metadataKey=team&metadataValue=null":                            func(_ string, it item) bool { return strings.Contains(it.metadata, `null`) },
		"metadataKey=n&metadataValue=1":                                  func(_ string, it item) bool { return strings.Contains(it.metadata, `"n":1}`) },
		"metadataKey=on&metadataValue=true":                              func(_ string, it item) bool { return strings.Contains(it.metadata, `true`) },
		"metadataKey=deep&metadataValue=" + url.QueryEscape(`{"a":[1]}`): func(_ string, it item) bool { return strings.Contains(it.metadata, `deep`) },
		"metadataKey=" + url.QueryEscape("zero\uFFFD") + "&metadataValue=" + url.QueryEscape("a\uFFFDb"): func(_ string, it item) bool { return strings.Contains(it.metadata, `zero`) },
		"metadataKey=team/red":        func(string, item) bool { return false },
		"createdAfter=" + stamp(mid):  func(_ string, it item) bool { return !it.created.Before(mid) },
		"createdBefore=" + stamp(mid): func(_ string, it item) bool { return it.created.Before(mid) },
		"createdAfter=" + stamp(mid) + "&createdBefore=" + stamp(mid.Add(time.Second)): func(_ string, it item) bool { return it.created.Equal(mid) },
		"updatedAfter=" + stamp(items[20].updated):                                     func(r string, it item) bool { return !updated(r, it).Before(items[20].updated) },
		"updatedBefore=" + stamp(items[20].updated):                                    func(r string, it item) bool { return updated(r, it).Before(items[20].updated) },
		"text=log":             func(_ string, it item) bool { return strings.Contains(it.title, "LOG") },
		"text=%25+OF+it_":      func(_ string, it item) bool { return strings.Contains(it.title, "%") },
		"text=ed%22%2C%22n%22": func(_ string, it item) bool { return strings.Contains(it.metadata, `red`) },
		"text=nothing":         func(r string, it item) bool { return r == "executions" && strings.Contains(it.result, "Nothing") },
		"status=closed":        func(_ string, it item) bool { return it.status == "closed" },
		"phase=running":        func(_ string, it item) bool { return it.phase == "running" },
	} {
		for _, route := range []string{"sessions", "executions"} {
			if route == "sessions" && strings.HasPrefix(query, "phase") || route == "executions" && strings.HasPrefix(query, "status") {
				continue
			}
			for _, sort := range []string{"", "sort=created&order=asc", "sort=updated", "sort=updated&order=asc"} {
				want := []string{}
				kept := slices.DeleteFunc(slices.Clone(items), func(it item) bool { return !keep(route, it) })
				slices.SortFunc(kept, func(a, b item) int {
					at := func(it item) time.Time {
						if strings.HasPrefix(sort, "sort=updated") {
							return updated(route, it)
						}
						return it.created
					}
					id := func(it item) string {
						if route == "sessions" {
							return it.session
						}
						return it.execution
					}
					c := cmp.Or(at(a).Compare(at(b)), strings.Compare(id(a), id(b)))
					if !strings.HasSuffix(sort, "asc") {
						c = -c
					}
					return c
				})
				for _, it := range kept {
					if route == "sessions" {
						want = append(want, it.session)
					} else {
						want = append(want, it.execution)
					}
				}
				if got := g.all(route, query+"&"+sort, 7); !slices.Equal(got, want) {
					t.Errorf("%s?%s&%s: got %d rows %v, want %d %v", route, query, sort, len(got), got, len(want), want)
				}
			}
		}
	}
}

// TestPageToken_AnotherFilterIsRefused tests that a page token is valid only for its list, filter and sort order.
func TestPageToken_AnotherFilterIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	w.createItems("default", 9)
	sessions := g.get("/api/sessions?pageSize=1").want(t, 200).text("nextPageToken")
	executions := g.get("/api/executions?pageSize=1&sort=created&order=desc").want(t, 200).text("nextPageToken")
	g.get("/api/sessions?pageSize=3&sort=created&pageToken="+sessions).want(t, 200) // explicit defaults denote the same list
	g.get("/api/executions?pageSize=3&pageToken="+executions).want(t, 200)
	for _, path := range []string{
		"sessions?status=open&pageToken=" + sessions, "sessions?sort=updated&pageToken=" + sessions, "sessions?order=asc&pageToken=" + sessions,
		"sessions?metadataKey=a&metadataValue=&pageToken=" + sessions, "sessions?text=a&pageToken=" + sessions,
		"sessions?pageToken=" + executions, "executions?pageToken=" + sessions, "executions?phase=failed&pageToken=" + executions,
		"sessions?pageToken=AAAA", "sessions?pageToken=e30", "executions?pageToken=%20",
	} {
		g.get("/api/"+path).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
	}
}

func TestLists_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	for query, field := range map[string]string{
		"agent=No+Slug": "agent", "agent=reviewer%40latest": "agent", "architecture=gpt": "architecture", "sort=name": "sort", "order=up": "order",
		"createdAfter=yesterday": "createdAfter", "createdBefore=2026-01-01": "createdBefore", "updatedAfter=1": "updatedAfter", "updatedBefore=x": "updatedBefore",
		"createdAfter=2026-01-02T00:00:00Z&createdBefore=2026-01-02T00:00:00Z": "createdBefore", "metadataValue=x": "metadataValue",
		"metadataKey=%00": "metadataKey", "metadataKey=a&metadataValue=%00": "metadataValue", "metadataKey=" + strings.Repeat("k", 1025): "metadataKey",
		"text=%00": "text", "text=" + strings.Repeat("x", 257): "text", "pageSize=201": "pageSize", "colour=red": "colour", "sort=created&sort=updated": "sort",
	} {
		for _, route := range []string{"sessions", "executions"} {
			g.get("/api/"+route+"?"+query).wantProblem(t, 400, "INVALID_REQUEST", field)
		}
	}
	g.get("/api/sessions?status=running").wantProblem(t, 400, "INVALID_REQUEST", "status")
	g.get("/api/executions?phase=open").wantProblem(t, 400, "INVALID_REQUEST", "phase")
}

// TestListSessions_FiltersByPhase tests the filters for phases and open approval requests, over pages, and that they
// show no session of another tenant.
func TestListSessions_FiltersByPhase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	phases := []string{"queued", "running", "waiting_for_approval", "failed", "idle"}
	set := func(tenant string, i int, it item) {
		failed := ""
		if i%5 == 3 {
			failed = it.execution
		}
		w.exec("UPDATE sessions SET phase = $3, open_approvals = $4, failed_execution = $5 WHERE tenant = $1 AND id = $2", tenant, it.session, phases[i%5], i%3, failed)
	}
	items := w.createItems("default", 60)
	slices.SortFunc(items, func(a, b item) int {
		return cmp.Or(b.created.Compare(a.created), strings.Compare(b.session, a.session))
	})
	for i, it := range items {
		set("default", i, it)
	}
	for i, it := range w.createItems("other", 20) {
		set("other", i, it)
	}
	for query, keep := range map[string]func(i int) bool{
		"phase=failed":                        func(i int) bool { return i%5 == 3 },
		"phase=idle&phase=queued&phase=idle":  func(i int) bool { return i%5 == 4 || i%5 == 0 },
		"hasOpenApprovals=true":               func(i int) bool { return i%3 > 0 },
		"hasOpenApprovals=false":              func(i int) bool { return i%3 == 0 },
		"phase=running&hasOpenApprovals=true": func(i int) bool { return i%5 == 1 && i%3 > 0 },
		"phase=waiting_for_approval&status=open&text=a": func(i int) bool {
			return i%5 == 2 && items[i].status == "open" && (strings.Contains(strings.ToLower(items[i].title), "a") || strings.Contains(strings.ToLower(items[i].metadata), "a"))
		},
	} {
		want := []string{}
		for i, it := range items {
			if keep(i) {
				want = append(want, it.session)
			}
		}
		if got := g.all("sessions", query, 4); !slices.Equal(got, want) || len(want) == 0 {
			t.Errorf("%s: got %d rows %v, want %d %v", query, len(got), got, len(want), want)
		}
	}
	for query, field := range map[string]string{
		"phase=completed": "phase", "phase=": "phase", "phase=failed&phase=Failed": "phase", "phase=failed%00": "phase", "phase=" + strings.Repeat("x", 1000): "phase",
		"hasOpenApprovals=maybe": "hasOpenApprovals", "hasOpenApprovals=": "hasOpenApprovals", "hasOpenApprovals=true&hasOpenApprovals=false": "hasOpenApprovals",
	} {
		g.get("/api/sessions?"+query).wantProblem(t, 400, "INVALID_REQUEST", field)
	}
	if a := g.get("/api/sessions?phase=completed"); !strings.Contains(a.text("detail"), strings.Join(phases, ", ")) {
		t.Errorf("the error does not list the phases: %s", a)
	}
	g.get("/api/executions?hasOpenApprovals=true").wantProblem(t, 400, "INVALID_REQUEST", "hasOpenApprovals")
	token := g.get("/api/sessions?pageSize=1&phase=failed").want(t, 200).text("nextPageToken")
	g.get("/api/sessions?pageSize=1&phase=failed&phase=failed&pageToken="+token).want(t, 200)
	g.get("/api/sessions?phase=idle&pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
	g.get("/api/sessions?phase=failed&hasOpenApprovals=true&pageToken="+token).wantProblem(t, 400, "INVALID_REQUEST", "pageToken")
}

// TestGetSession_ShowsPhaseErrorAndTotals tests the fields about a session's executions, by its id and in a list.
func TestGetSession_ShowsPhaseErrorAndTotals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	it := w.createItems("default", 1)[0]
	w.exec("UPDATE executions SET phase = 'failed', code = 'AGENT_FAILED', message = 'no <answer>' WHERE id = $1", it.execution)
	w.exec(`UPDATE sessions SET phase = 'failed', phase_since = '2026-03-04T05:06:07Z', failed_execution = $2, open_approvals = 2, input_tokens = 5000000000, output_tokens = 7,
		cache_read_tokens = 8, cache_write_tokens = 9, cost_usd = 0.25 WHERE id = $1`, it.session, it.execution)
	list, _ := g.get("/api/sessions").want(t, 200).field("sessions").([]any)
	one := g.get("/api/sessions/"+it.session).want(t, 200)
	for name, want := range map[string]string{
		"phase": "failed", "phaseSince": "2026-03-04T05:06:07Z", "openApprovals": "2", "costUsd": "0.25",
		"usage":     "map[cacheReadTokens:8 cacheWriteTokens:9 inputTokens:4294967295 outputTokens:7]",
		"lastError": "map[code:AGENT_FAILED executionId:" + it.execution + " message:no <answer> time:" + it.ended.Format(time.RFC3339) + "]",
	} {
		if got := fmt.Sprint(one.field(name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
		if got := fmt.Sprint(list[0].(map[string]any)[name]); got != want {
			t.Errorf("in the list %s is %s, want %s", name, got, want)
		}
	}
	w.exec("UPDATE sessions SET phase = 'idle', failed_execution = ''")
	if e := g.get("/api/sessions/"+it.session).want(t, 200).field("lastError"); e != nil {
		t.Errorf("without a failure lastError is %v", e)
	}
}
