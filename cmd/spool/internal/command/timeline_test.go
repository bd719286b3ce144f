package command

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// serveTimeline serves a page of blocks and a timeline, and records the query of the last request.
func serveTimeline(t *testing.T) (url string, query *string) {
	t.Helper()
	query = new(string)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		*query = r.URL.RawQuery
		w.Header().Set("Content-Type", "application/json")
		if strings.HasSuffix(r.URL.Path, "/timeline") {
			fmt.Fprint(w, `{"tip":9,"start":"2026-01-02T03:04:05Z","end":"2026-01-02T03:04:45Z","bucketMs":10000,"lanes":[{"kind":"session","total":1,"events":[0,0,0,1]},
				{"kind":"conversation","conversationId":"sub\u001b[2J","name":"helper","total":8,"events":[7,1,0,0]}],"moreLanes":3,
				"marks":[{"seq":5,"time":"2026-01-02T03:04:15Z","kind":"error","type":"error","code":"BROKEN","message":"it broke\u001b[2J"}],"moreMarks":2}`)
			return
		}
		fmt.Fprint(w, `{"blocks":[{"id":"b2","kind":"assistant_text","status":"pending","timestamp":"2026-01-02T03:04:05Z","content":"second"},
			{"id":"b1","kind":"user_message","status":"complete","timestamp":"2026-01-02T03:04:05Z","content":"first\u001b[2J"}],"tip":9,"next":"token","truncated":[]}`)
	}))
	t.Cleanup(s.Close)
	return s.URL, query
}

func TestBlocks_PrintsAPage(t *testing.T) {
	t.Parallel()
	url, query := serveTimeline(t)
	got := spool(t, testIO(t), "blocks", ses, "--conversation", "sub", "--before", "x", "--limit", "2", "--url", url).out
	if i, j := strings.Index(got, "second"), strings.Index(got, "first"); i < 0 || j < i || !strings.Contains(got, "--before token") || strings.Contains(got, "\x1b[2J") {
		t.Errorf("got %q", got)
	}
	if *query != "before=x&conversationId=sub&limit=2&order=newest" {
		t.Errorf("requested %s", *query)
	}
	if got := spool(t, testIO(t), "blocks", ses, "--json", "--url", url).out; !strings.Contains(got, `"next":"token"`) {
		t.Errorf("got %q", got)
	}
}

func TestTimeline_PrintsLanesAndMarks(t *testing.T) {
	t.Parallel()
	url, query := serveTimeline(t)
	got := spool(t, testIO(t), "timeline", ses, "--buckets", "4", "--url", url).out
	for _, want := range []string{"10s for each character, up to event 9", "|   #|", "|#.  |", "helper", "and 3 more conversations", "2 earlier marks are omitted", "BROKEN it broke"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in %s", want, got)
		}
	}
	if *query != "buckets=4" || strings.Contains(got, "\x1b[2J") {
		t.Errorf("requested %s, got %q", *query, got)
	}
}
