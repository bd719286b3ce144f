package command

import (
	"strings"
	"testing"
)

// TestDead_ListsShowsRetriesAndDrops tests that the command continues after a letter that the server refuses,
// and then fails with the name of the field.
func TestDead_ListsShowsRetriesAndDrops(t *testing.T) {
	t.Parallel()
	f := serve(t)
	for name, c := range map[string]struct {
		args     []string
		code     int
		out, err string
	}{
		"ls":      {[]string{"ls"}, ExitDone, "job.local.any", ""},
		"ls JSON": {[]string{"ls", "--json"}, ExitDone, `"reason":"no use"`, ""},
		"show":    {[]string{"show", "7"}, ExitDone, "after 3 deliveries", ""},
		"drop":    {[]string{"drop", "7"}, ExitDone, "dropped 7\n", ""},
		"retry":   {[]string{"retry", "8", "7"}, ExitFailed, "retried 7\n", "sessionId"},
		"minus":   {[]string{"ls", "--limit=-1"}, ExitUsage, "", "limit: -1 is less than 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := spool(t, testIO(t), append(append([]string{"dead"}, c.args...), "--url", f.URL)...)
			if got.code != c.code || !strings.Contains(got.out, c.out) || !strings.Contains(got.err, c.err) {
				t.Errorf("got %+v", got)
			}
		})
	}
}
