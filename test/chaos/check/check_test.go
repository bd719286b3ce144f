package check_test

import (
	"compress/gzip"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/chaos/check"
	"github.com/spoolhq/spool/test/compat"
)

// recorded returns the observations of a real run: the sessions of a recorded data folder, each with a client that received
// everything.
func recorded(t *testing.T) check.Observations {
	t.Helper()
	f, err := os.Open("../../compat/testdata/a4717e1/manifest.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() //nolint:errcheck // the file is only read
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var m compat.Recording
	if err := json.NewDecoder(z).Decode(&m); err != nil {
		t.Fatal(err)
	}
	e := check.Observations{Accepted: map[string]string{}, Log: map[string][]check.Event{}}
	for _, s := range m.Sessions {
		if s.Deleted || s.Name == compat.OpenTurnSession {
			continue
		}
		var list []check.Event
		for _, w := range s.Events {
			list = append(list, check.Event{Seq: w.Seq, ID: w.ID, Type: w.Type, ExecutionID: w.ExecutionID, Data: string(w.Data)})
			if w.Type == (events.MessageAccepted{}).EventType() {
				e.Accepted[w.ExecutionID] = s.ID
			}
		}
		e.Log[s.ID] = list
		e.Streams = append(e.Streams, check.ClientRecord{Client: "SSE", Session: s.ID, Events: slices.Clone(list)})
	}
	return e
}

func TestCheck_FindsNothingInASoundRun(t *testing.T) {
	t.Parallel()
	e := recorded(t)
	if len(e.Accepted) < 10 || len(e.Streams) < 10 {
		t.Fatalf("the recording has %d queries and %d streams: too little to prove anything", len(e.Accepted), len(e.Streams))
	}
	if wrong := check.CompareWithLog(e); wrong != nil {
		t.Errorf("Check found %q", wrong)
	}
}

// TestCheck_FindsEveryFault removes, repeats and reorders one event at every position of a client's stream and of the
// log.
func TestCheck_FindsEveryFault(t *testing.T) {
	t.Parallel()
	faults := map[string]func(list []check.Event, i int) []check.Event{
		"dropped": func(list []check.Event, i int) []check.Event { return slices.Delete(slices.Clone(list), i, i+1) },
		"doubled": func(list []check.Event, i int) []check.Event { return slices.Insert(slices.Clone(list), i, list[i]) },
		"reordered": func(list []check.Event, i int) []check.Event {
			list = slices.Clone(list)
			j := (i + 1) % len(list)
			list[i], list[j] = list[j], list[i]
			return list
		},
		"changed": func(list []check.Event, i int) []check.Event {
			list = slices.Clone(list)
			list[i].Data += " "
			return list
		},
	}
	sound := recorded(t)
	for name, fault := range faults {
		tried := 0
		for n, s := range sound.Streams {
			for i := range s.Events {
				e := sound
				e.Streams = slices.Clone(sound.Streams)
				e.Streams[n].Events = fault(s.Events, i)
				if wrong := check.CompareWithLog(e); len(wrong) != 1 || !strings.HasPrefix(wrong[0], "SSE of "+s.Session) {
					t.Errorf("event %d of a client %s: Check found %q", i+1, name, wrong)
				}
				e = sound
				e.Log = map[string][]check.Event{}
				for id, list := range sound.Log {
					e.Log[id] = list
				}
				e.Log[s.Session] = fault(sound.Log[s.Session], i)
				if wrong := check.CompareWithLog(e); len(wrong) == 0 {
					t.Errorf("event %d of the log %s: Check found nothing", i+1, name)
				}
				tried++
			}
		}
		if tried < 100 {
			t.Errorf("only %d events were %s", tried, name)
		}
	}
}

// TestCheck_FindsEachBrokenPromise tests faults that the log alone shows, without the streams of clients.
func TestCheck_FindsEachBrokenPromise(t *testing.T) {
	t.Parallel()
	const s = "ses_1"
	ev := func(seq uint32, id string, typ events.Type) check.Event {
		return check.Event{Seq: seq, ID: id, Type: typ, ExecutionID: "exe_1"}
	}
	accepted, done, failed := (events.MessageAccepted{}).EventType(), (events.ExecutionCompleted{}).EventType(), (events.ExecutionFailed{}).EventType()
	for name, c := range map[string]struct {
		log  []check.Event
		told map[string]string
		want string
	}{
		"a query ends twice":               {[]check.Event{ev(1, "a", accepted), ev(2, "b", done), ev(3, "c", failed)}, map[string]string{"exe_1": s}, "ended 2 times"},
		"a query never ends":               {[]check.Event{ev(1, "a", accepted)}, map[string]string{"exe_1": s}, "ended 0 times"},
		"a query is accepted twice":        {[]check.Event{ev(1, "a", accepted), ev(2, "b", accepted), ev(3, "c", done)}, map[string]string{"exe_1": s}, "accepted 2 times"},
		"an answered query is not there":   {nil, map[string]string{"exe_1": s}, "accepted 0 times"},
		"a query that nobody was told of":  {[]check.Event{ev(1, "a", accepted), ev(2, "b", done)}, nil, "no client was told"},
		"seq has a gap":                    {[]check.Event{ev(1, "a", accepted), ev(3, "b", done)}, map[string]string{"exe_1": s}, "seq 3 instead of 2"},
		"an event is there under two seqs": {[]check.Event{ev(1, "a", accepted), ev(2, "b", done), {Seq: 3, ID: "a", Type: "log"}}, map[string]string{"exe_1": s}, "occurs twice"},
	} {
		wrong := check.CompareWithLog(check.Observations{Accepted: c.told, Log: map[string][]check.Event{s: c.log}})
		if !strings.Contains(strings.Join(wrong, "\n"), c.want) {
			t.Errorf("%s: Check found %q", name, wrong)
		}
	}
}
