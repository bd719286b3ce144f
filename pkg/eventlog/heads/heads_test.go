package heads_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog/heads"
)

func privateKey(t *testing.T, digit string) heads.PrivateKey {
	t.Helper()
	k, err := heads.ParsePrivateKey(strings.Repeat(digit, 64) + "\n")
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// seal returns the stored form of an entry, and the hash that the next entry covers.
func seal(t *testing.T, e heads.ChainEntry, k heads.PrivateKey) ([]byte, string) {
	t.Helper()
	stored, hash, err := e.Sign(k)
	if err != nil {
		t.Fatal(err)
	}
	return stored, hash
}

// TestSeal_FixedVector tests that the stored and signed bytes do not change between releases, because chains of
// earlier builds must stay verifiable.
func TestSeal_FixedVector(t *testing.T) {
	t.Parallel()
	e := heads.ChainEntry{
		Shard: 1, N: 7, Prev: "ab", Time: time.Date(2026, 1, 31, 12, 0, 0, 5, time.UTC), Through: 9,
		Heads: []heads.Head{{Subject: "ev.00.a<b.ses_1.life", Seq: 9, Hash: "cd"}},
	}
	stored, hash := seal(t, e, privateKey(t, "1"))
	const wantStored = `{"entry":{"v":1,"shard":1,"n":7,"prev":"ab","time":"2026-01-31T12:00:00.000000005Z","through":9,"heads":[{"subject":"ev.00.a<b.ses_1.life","seq":9,"hash":"cd"}]},` +
		`"key":"10ba682c8ad13513","signature":"UoD15Y995dqBscb5Bf9U4fFuU3qOfUSkjxphhpVDJ1VDFaSoqRzvQT6YnepDtqCBkf/wSX762GW/07hqeeZTDA=="}`
	const wantHash = "266eeb51ee0a3866a161331b206f31bf374f3acd6c4d69565a3578d569575d49"
	if string(stored) != wantStored || hash != wantHash {
		t.Errorf("stored is %s with hash %s", stored, hash)
	}
}

func TestOpenEntry_ReturnsTheSignedEntry(t *testing.T) {
	t.Parallel()
	k := privateKey(t, "1")
	want := heads.ChainEntry{Shard: 1, N: 7, Prev: "ab", Time: time.Unix(1_750_000_000, 0).UTC(), Through: 9, Heads: []heads.Head{{Subject: "s", Seq: 9, Hash: "h"}}}
	stored, sealed := seal(t, want, k)
	got, hash, err := heads.OpenEntry(stored, privateKey(t, "2").Public(), k.Public())
	if err != nil || hash != sealed || got.N != 7 || got.Through != 9 || len(got.Heads) != 1 || got.Heads[0] != want.Heads[0] {
		t.Errorf("Open returned %+v, %s, %v; want %+v, %s", got, hash, err, want, sealed)
	}
}

// TestOpenEntry_EveryByteIsCovered tests that OpenEntry fails when any byte of a stored entry is changed.
func TestOpenEntry_EveryByteIsCovered(t *testing.T) {
	t.Parallel()
	k := privateKey(t, "1")
	stored, hash := seal(t, heads.ChainEntry{N: 1, Time: time.Unix(1_750_000_000, 0).UTC(), Through: 9, Heads: []heads.Head{{Subject: "s", Seq: 9, Hash: "h"}}}, k)
	for i := range stored {
		changed := bytes.Clone(stored)
		changed[i] ^= 1
		e, got, err := heads.OpenEntry(changed, k.Public())
		if err == nil && got != hash {
			t.Errorf("byte %d (%q) was changed to %q, and Open returned %+v", i, stored[i], changed[i], e)
		}
	}
}

func TestOpenEntry_NamesAnUnknownKey(t *testing.T) {
	t.Parallel()
	k := privateKey(t, "1")
	stored, _ := seal(t, heads.ChainEntry{N: 1}, k)
	var unknown *heads.UnknownKeyError
	if _, _, err := heads.OpenEntry(stored, privateKey(t, "2").Public()); !errors.As(err, &unknown) || unknown.KeyID != k.Public().ID() {
		t.Errorf("Open returned %v", err)
	}
}

func TestParseKeys_NeverRepeatTheKey(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "zz", strings.Repeat("1", 63), strings.Repeat("1", 66), strings.Repeat("g", 64)} {
		_, err := heads.ParsePrivateKey(text)
		if err == nil || text != "" && strings.Contains(err.Error(), text) {
			t.Errorf("%q: ParsePrivateKey returned %v", text, err)
		}
		if _, err := heads.ParsePublicKey(text); err == nil {
			t.Errorf("%q: ParsePublicKey accepted it", text)
		}
	}
	k := privateKey(t, "1").Public()
	if back, err := heads.ParsePublicKey(" " + k.String() + "\n"); err != nil || back.ID() != k.ID() {
		t.Errorf("ParsePublicKey returned %v, %v", back, err)
	}
}

// TestChain_Faults tests that entries that are missing, repeated, out of order or of another shard are reported, and
// that the other entries are still compared.
func TestChain_Faults(t *testing.T) {
	t.Parallel()
	k := privateKey(t, "1")
	var list [][]byte
	prev := ""
	for n := uint64(1); n <= 4; n++ {
		var stored []byte
		stored, prev = seal(t, heads.ChainEntry{N: n, Prev: prev, Through: n * 10, Heads: []heads.Head{{Subject: "s", Seq: n * 10, Hash: "h"}}}, k)
		list = append(list, stored)
	}
	other, _ := seal(t, heads.ChainEntry{Shard: 3, N: 5, Prev: prev, Through: 50}, k)
	back, _ := seal(t, heads.ChainEntry{N: 5, Prev: prev, Through: 5}, k)
	for _, c := range []struct {
		name    string
		entries [][]byte
		want    string // "" if there is no fault
	}{
		{"whole", list, ""},
		{"one is missing", [][]byte{list[0], list[2], list[3]}, "has number 3 instead of 2"},
		{"the first is missing", list[1:], "has number 2 instead of 1"},
		{"one is stored again", [][]byte{list[0], list[1], list[1], list[2], list[3]}, "has number 2 instead of 3"},
		{"one is of another shard", append(list[:4:4], other), "is an entry of shard 3"},
		{"one goes back", append(list[:4:4], back), "covers the log up to 5, but an earlier entry covers it up to 40"},
		{"one is damaged", [][]byte{list[0], bytes.Replace(list[1], []byte(`"hash":"h"`), []byte(`"hash":"x"`), 1), list[2], list[3]}, "the signature does not match"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			chain := heads.NewChain(0)
			for i, stored := range c.entries {
				if err := chain.Add(uint64(i)+1, stored, k.Public()); err != nil {
					t.Fatal(err)
				}
			}
			faults := chain.Faults()
			if c.want == "" && len(faults) > 0 || c.want != "" && (len(faults) == 0 || !strings.Contains(faults[0].Why, c.want)) {
				t.Errorf("the faults are %+v, want %q", faults, c.want)
			}
			check := chain.Compare(nil)
			if why, _ := check.Add("s", 40, "other"); c.name != "one is missing" && why == "" {
				t.Error("a head that an entry after the fault lists is not compared")
			}
		})
	}
}

// TestCompare_FindsCommitsThatNoEntryLists tests that a commit is reported if it was inserted into the log after an
// entry had covered its position.
func TestCompare_FindsCommitsThatNoEntryLists(t *testing.T) {
	t.Parallel()
	k := privateKey(t, "1")
	stored, _ := seal(t, heads.ChainEntry{N: 1, Through: 10, Heads: []heads.Head{{Subject: "a", Seq: 4, Hash: "h4"}, {Subject: "b", Seq: 9, Hash: "h9"}}}, k)
	chain := heads.NewChain(0)
	if err := chain.Add(1, stored, k.Public()); err != nil {
		t.Fatal(err)
	}
	check := chain.Compare(nil)
	for _, commit := range []struct {
		subject string
		seq     uint64
		hash    string
	}{{"a", 2, "h2"}, {"a", 4, "h4"}, {"a", 6, "h6"}, {"b", 9, "h9"}, {"c", 10, "h10"}, {"c", 11, "h11"}} {
		if why, before := check.Add(commit.subject, commit.seq, commit.hash); why != "" || len(before) > 0 && commit.seq <= 10 {
			t.Errorf("%v: %s, %+v", commit, why, before)
		} else if commit.seq == 11 && len(before) != 2 {
			t.Errorf("the range ends with %+v, want faults of a at 6 and c at 10", before)
		}
	}
	if faults, missing := check.Finish(); len(faults)+len(missing) != 0 {
		t.Errorf("at the end there are %+v and %+v", faults, missing)
	}
}
