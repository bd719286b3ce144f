package wire_test

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/workspace/wire"
)

// anyEntry draws an entry that Check accepts.
func anyEntry(t *rapid.T) wire.Entry {
	name := rapid.StringMatching(`[^/\x00]{1,5}`).Filter(func(s string) bool { return s != "." && s != ".." })
	raw := rapid.Map(rapid.SliceOfN(rapid.ByteRange(1, 255).Filter(func(b byte) bool { return b != '/' && b != '.' }), 1, 4), func(b []byte) string { return string(b) })
	e := wire.Entry{
		Path: rapid.SampledFrom([]string{"workspace/", "state/"}).Draw(t, "tree") + strings.Join(rapid.SliceOfN(rapid.OneOf(name, raw), 1, 3).Draw(t, "path"), "/"),
		Kind: rapid.SampledFrom([]wire.EntryKind{wire.KindFile, wire.KindDir, wire.KindSymlink}).Draw(t, "kind"),
	}
	if e.Kind == wire.KindSymlink {
		e.Target = rapid.OneOf(name, raw).Draw(t, "target")
		return e
	}
	e.Mode = rapid.Uint32Range(0, 0o777).Draw(t, "mode")
	e.ModTime = time.Unix(rapid.Int64Range(-1<<40, 1<<40).Draw(t, "seconds"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns")).UTC()
	if e.Kind == wire.KindFile {
		e.Size = rapid.Int64Range(0, 3*wire.BlockSize).Draw(t, "size")
		for i := range wire.BlockCount(e.Size) {
			e.Blocks = append(e.Blocks, wire.HashOf([]byte{byte(i)}))
		}
		e.Unsettled = rapid.Bool().Draw(t, "unsettled")
	}
	return e
}

func TestEntry_RoundTrips(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		e := anyEntry(t)
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
		line, err := e.CanonicalLine()
		if err != nil {
			t.Fatal(err)
		}
		got, err := wire.ParseEntry(line)
		if err != nil || !reflect.DeepEqual(got, e) {
			t.Fatalf("%s\ngot  %+v\nwant %+v (%v)", line, got, e, err)
		}
	})
}

// TestLine_FixedVectors tests that the form of a line does not change, because snapshot ids are derived from it.
func TestLine_FixedVectors(t *testing.T) {
	t.Parallel()
	tree := wire.NewTreeValidator()
	when := time.Unix(1_700_000_000, 5)
	for _, c := range []struct {
		e    wire.Entry
		want string
	}{
		{wire.Entry{Path: "state/\xff", Kind: wire.KindSymlink, Target: "\xfe"}, `{"rawPath":"c3RhdGUv/w==","kind":"symlink","rawTarget":"/g=="}`},
		{wire.Entry{Path: "workspace/d", Kind: wire.KindDir, Mode: 0o755, ModTime: when}, `{"path":"workspace/d","kind":"dir","mode":493,"mtime":1700000000,"mtimeNs":5}`},
		{wire.Entry{Path: "workspace/d/f", Kind: wire.KindFile, Size: 1, Mode: 0o644, ModTime: time.Unix(0, 0), Blocks: []wire.Hash{wire.HashOf([]byte("1"))}},
			`{"path":"workspace/d/f","kind":"file","size":1,"mode":420,"mtime":0,"sha256":["6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"]}`},
	} {
		if line, err := tree.Add(&c.e); err != nil || string(line) != c.want {
			t.Errorf("got  %s (%v)\nwant %s", line, err, c.want)
		}
	}
	const id = "m-4b3c5de2066326958b9c487b7504049d737cad952f161338271c27b89827dd98" // sha256sum of the lines
	if got := tree.ID(); got != id || wire.CheckSnapshotID(got) != nil {
		t.Errorf("id %s", got)
	}
}

// TestOrder_SortsLikeAWalk tests that paths sort like a walk that visits the names of each folder in byte order.
func TestOrder_SortsLikeAWalk(t *testing.T) {
	t.Parallel()
	want := []string{"state/z", "workspace/a", "workspace/a/b", "workspace/a/b/c", "workspace/a!", "workspace/a-b", "workspace/a0", "workspace/b"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, wire.ComparePaths)
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

func TestReader_ReadsFramesAndReportsCuts(t *testing.T) {
	t.Parallel()
	var buf bytes.Buffer
	w := wire.NewWriter(&buf)
	frames := []string{"", "x", strings.Repeat("long", wire.MaxFrameSize/4)}
	for _, f := range frames {
		if err := w.WriteFrame(wire.FrameBlock, []byte(f)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.WriteFrame(wire.FrameBlock, make([]byte, wire.MaxFrameSize+1)); err == nil {
		t.Error("a frame that is too long was accepted")
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	whole := buf.Bytes()
	r := wire.NewReader(bytes.NewReader(whole))
	for i, f := range frames {
		if kind, content, err := r.Next(); err != nil || kind != wire.FrameBlock || string(content) != f {
			t.Errorf("frame %d: %c %d bytes %v", i, kind, len(content), err)
		}
	}
	for _, n := range []int{0, 1, 4, 5, 6, 10, len(whole) - 1, len(whole)} {
		r := wire.NewReader(bytes.NewReader(whole[:n]))
		var err error
		for err == nil {
			_, _, err = r.Next()
		}
		if !errors.Is(err, wire.ErrStreamCut) {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	if _, _, err := wire.NewReader(strings.NewReader("exec: no such file or directory")).Next(); err == nil || errors.Is(err, wire.ErrStreamCut) {
		t.Errorf("input that is not a frame: %v", err)
	}
}

// FuzzReader tests that any input ends without a panic and in bounded memory.
func FuzzReader(f *testing.F) {
	f.Add([]byte("E\x00\x00\x00\x02{}"))
	f.Add([]byte("\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := wire.NewReader(bytes.NewReader(raw))
		tree := wire.NewTreeValidator()
		for {
			_, content, err := r.Next()
			if err != nil {
				if errors.Is(err, io.EOF) {
					t.Error("a cut is reported as the end")
				}
				return
			}
			if e, err := wire.ParseEntry(content); err == nil {
				_, _ = tree.Add(&e) // either outcome is allowed
			}
		}
	})
}
