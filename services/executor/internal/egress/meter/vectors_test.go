package meter_test

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/modelstreamtest"
	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
)

// TestResponse_ReadsWhatServersSend meters the answers of all variants of what model servers send.
func TestResponse_ReadsWhatServersSend(t *testing.T) {
	t.Parallel()
	vectors, err := modelstreamtest.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		for i, a := range v.Answers {
			t.Run(fmt.Sprintf("%s %d", v.Name, i), func(t *testing.T) {
				t.Parallel()
				body := a.Bytes()
				for _, size := range []int{len(body) + 1, 1, 7} {
					r := meter.NewResponseMeter()
					for rest := body; rest != ""; rest = rest[min(size, len(rest)):] {
						if _, err := io.WriteString(r, rest[:min(size, len(rest))]); err != nil {
							t.Fatal(err)
						}
					}
					got := r.Result()
					if want := (events.Usage{InputTokens: a.Usage[0], OutputTokens: a.Usage[1]}); got.Usage != want || got.Seen != (want != events.Usage{}) {
						t.Errorf("in pieces of %d: usage %+v, want %+v", size, got, want)
					}
					if (a.Error == "") != (got.Error == "") || !strings.Contains(got.Error, a.Error) {
						t.Errorf("in pieces of %d: error %q, want %q", size, got.Error, a.Error)
					}
				}
			})
		}
	}
}
