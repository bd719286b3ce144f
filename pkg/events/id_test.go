package events_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
)

func TestNewID_EncodesTheTime(t *testing.T) {
	t.Parallel()
	entropy, err := hex.DecodeString("00112233445566778899")
	if err != nil {
		t.Fatal(err)
	}
	id, err := events.NewID(events.KindSession, time.UnixMilli(1_469_918_176_385), bytes.NewReader(entropy))
	if err != nil {
		t.Fatal(err)
	}
	// The first ten characters encode the time of the example in the ULID specification.
	if want := "ses_01ARYZ6S4100H248H6ANCSAXWCS"; id[:14] != want[:14] || len(id) != len("ses_")+26 {
		t.Errorf("the id is %s, want the time of %s", id, want)
	}
	if err := events.CheckID("id", events.KindSession, id); err != nil {
		t.Error(err)
	}
	if _, err := events.NewID(events.KindSession, goldenTime, bytes.NewReader(entropy[:9])); err == nil {
		t.Error("NewID accepted nine bytes of entropy")
	}
}

func TestNewID_SortsByTime(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		ms := rapid.Int64Range(0, 1<<47)
		a, b := ms.Draw(t, "a"), ms.Draw(t, "b")
		random := rapid.SliceOfN(rapid.Byte(), 10, 10)
		x, err1 := events.NewID(events.KindEvent, time.UnixMilli(a), bytes.NewReader(random.Draw(t, "x")))
		y, err2 := events.NewID(events.KindEvent, time.UnixMilli(b), bytes.NewReader(random.Draw(t, "y")))
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		if a < b && x >= y || a > b && x <= y {
			t.Fatalf("%s of %d and %s of %d are out of order", x, a, y, b)
		}
		for _, id := range []string{x, y} {
			if err := events.CheckID("id", events.KindEvent, id); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestDeriveID_FixedVectors(t *testing.T) {
	t.Parallel()
	// The log contains these ids: they must not change.
	for want, got := range map[string]string{
		"evt_7X34H9GW6HBRH0V9B2JX3E8GFT": events.DeriveID(events.KindEvent, "cmd_1", "0"),
		"ses_3Z8D3Q7T1YWK19K79RTYFAB830": events.DeriveID(events.KindSession),
	} {
		if got != want {
			t.Errorf("derived %s, want %s", got, want)
		}
	}
	seen := map[string]string{}
	for _, parts := range [][]string{{}, {""}, {"", ""}, {"ab"}, {"a", "b"}, {"ab", ""}, {"", "ab"}} {
		for _, k := range []events.IDKind{events.KindEvent, events.KindBlock} {
			id := events.DeriveID(k, parts...)
			if err := events.CheckID("id", k, id); err != nil {
				t.Error(err)
			}
			if other, ok := seen[id[4:]]; ok {
				t.Errorf("%q and %s give the same id", parts, other)
			}
			seen[id[4:]] = strings.Join(parts, "|")
		}
	}
}

func TestCheckID_NamesTheFieldAndTheKind(t *testing.T) {
	t.Parallel()
	good := events.DeriveID(events.KindSession, "a")
	for _, bad := range []string{
		"", "ses_", "ses", good[4:], "exe" + good[3:], good + "0", good[:29], good[:29] + "*", good[:29] + ">", good[:29] + ".",
		good[:29] + " ", good[:29] + "\x00", good[:29] + "I", good[:29] + "l", strings.ToLower(good), "ses_8" + good[5:], good[:28] + "é", "ses-" + good[4:],
	} {
		err := events.CheckID("sessionId", events.KindSession, bad)
		var id *events.IDError
		if !errors.As(err, &id) || id.Field != "sessionId" || id.Want != events.KindSession || !strings.Contains(err.Error(), "sessionId") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	long := events.CheckID("sessionId", events.KindSession, strings.Repeat("x", 10_000))
	if long == nil || len(long.Error()) > 300 {
		t.Errorf("the error of a long id has %d bytes", len(long.Error()))
	}
}

func FuzzCheckID(f *testing.F) {
	f.Add(events.DeriveID(events.KindSession, "a"))
	f.Add("ses_*")
	f.Add("ses_01ARYZ6S41TSV4RRFFQ69G5FA\x00")
	f.Fuzz(func(t *testing.T, s string) {
		if events.CheckID("id", events.KindSession, s) != nil {
			return
		}
		// An accepted id is safe as a token of a subject, as a key and in the name of a durable.
		if len(s) != 30 || strings.ContainsAny(s, ".*> \t\r\n\x00/\\") || strings.ToUpper(s[4:]) != s[4:] {
			t.Errorf("%q passed", s)
		}
	})
}
