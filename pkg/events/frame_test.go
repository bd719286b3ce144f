package events_test

import (
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

// TestFrame_ReturnsItsDeltas checks that a frame of arbitrary deltas is read as it was written.
func TestFrame_ReturnsItsDeltas(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.Uint64().Draw(t, "number")
		b := events.AppendFrameHeader(nil, number)
		var want []string
		for i := range rapid.IntRange(0, 20).Draw(t, "deltas") {
			d := events.Delta{BlockID: fmt.Sprint(i), Text: rapid.String().Draw(t, "text")}
			raw, err := d.Encode()
			if err != nil {
				t.Fatal(err)
			}
			key := events.FrameSessionKey("acme", fmt.Sprintf("ses_%d", i%3))
			b = events.AppendFrameDelta(b, key, raw)
			want = append(want, key+"|"+string(raw))
		}
		if got, err := events.FrameNumber(b); err != nil || got != number {
			t.Fatalf("FrameNumber = %d, %v; want %d", got, err, number)
		}
		var got []string
		for d, err := range events.FrameDeltas(b) {
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, string(d.Session)+"|"+string(d.JSON))
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Fatalf("deltas = %q, want %q", got, want)
		}
	})
}

// TestFrame_RefusesDamagedFrames checks that a damaged frame ends with an error instead of a wrong delta.
func TestFrame_RefusesDamagedFrames(t *testing.T) {
	t.Parallel()
	whole := string(events.AppendFrameDelta(events.AppendFrameHeader(nil, 7), "acme ses_1", []byte(`{"blockId":"b"}`)))
	for name, frame := range map[string]string{
		"empty message":                    "",
		"JSON of a delta":                  `{"blockId":"b"}`,
		"later version of the form":        strings.Replace(whole, "frame 1", "frame 2", 1),
		"number that is not a number":      strings.Replace(whole, "1 7", "1 x", 1),
		"end in the middle of a delta":     whole[:len(whole)-5],
		"delta without a length":           strings.Replace(whole, " 15\n", "\n", 1),
		"length beyond the frame's end":    strings.Replace(whole, " 15\n", " 99\n", 1),
		"length beyond all numbers":        strings.Replace(whole, " 15\n", " 99999999999999999999\n", 1),
		"negative length":                  strings.Replace(whole, " 15\n", " -1\n", 1),
		"length that ends inside the JSON": strings.Replace(whole, " 15\n", " 14\n", 1),
	} {
		failed := false
		for _, err := range events.FrameDeltas([]byte(frame)) {
			failed = failed || err != nil
		}
		if !failed {
			t.Errorf("%s: no error", name)
		}
	}
}

// FuzzFrameDeltas checks that no message makes the decoder panic or return more bytes than it has.
func FuzzFrameDeltas(f *testing.F) {
	f.Add([]byte("frame 1 1\nacme ses_1 2\n{}\n"))
	f.Add([]byte("frame 1 1\n \n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		for d, err := range events.FrameDeltas(b) {
			if err != nil {
				return
			}
			n += len(d.Session) + len(d.JSON)
		}
		if n > len(b) {
			t.Fatalf("%d bytes of deltas in a frame of %d", n, len(b))
		}
	})
}

func TestFrameExecutor_AcceptsSubjectsOfFramesOnly(t *testing.T) {
	t.Parallel()
	if got, ok := events.FrameExecutor(events.FrameSubject(5, "xtr_1")); !ok || got != "xtr_1" {
		t.Errorf("FrameExecutor = %q, %v", got, ok)
	}
	for _, subject := range []string{"dl.05.acme.ses_1", "dl.05", "dl.05.", "live.05.x", ""} {
		if got, ok := events.FrameExecutor(subject); ok {
			t.Errorf("FrameExecutor(%q) = %q", subject, got)
		}
	}
}
