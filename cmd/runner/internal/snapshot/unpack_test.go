package snapshot_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/snapshot"
	"github.com/spoolhq/spool/pkg/workspace"
)

func archive(t *testing.T, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, h := range entries {
		content := ""
		if h.Typeflag == 0 || h.Typeflag == tar.TypeReg {
			h.Typeflag, content = tar.TypeReg, "content of "+h.Name
			h.Size = int64(len(content))
		}
		if h.Mode == 0 && h.Typeflag != tar.TypeXGlobalHeader {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &out
}

func TestUnpack_ReplacesFiles(t *testing.T) {
	t.Parallel()
	b := newBox(t)
	put(t, b.workspace, "in/kept", "kept")
	put(t, b.workspace, "in/replaced", "old")
	when := time.Unix(1_600_000_000, 0)
	a := archive(t,
		tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{"comment": "made by git"}},
		tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		tar.Header{Name: "replaced", ModTime: when},
		tar.Header{Name: "./dot"},
		tar.Header{Name: "ro/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: when},
		tar.Header{Name: "ro/run.sh", Mode: 0o6755, ModTime: when},
		tar.Header{Name: "deep/er/still"},
		tar.Header{Name: "deep/up", Typeflag: tar.TypeSymlink, Linkname: "../dot"},
		tar.Header{Name: "top", Typeflag: tar.TypeSymlink, Linkname: "../in"},
		tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "dot"},
		tar.Header{Name: strings.Repeat("long/", 40) + "\xff"},
	)
	if err := workspace.UnpackTar(t.Context(), b, "in", a); err != nil {
		t.Fatal(err)
	}
	got := tree(t, b.workspace)
	for path, content := range map[string]string{
		"in/kept": "kept", "in/replaced": "content of replaced", "in/dot": "content of ./dot", "in/ro/run.sh": "content of ro/run.sh",
		"in/deep/er/still": "content of deep/er/still", "in/deep/up": "../dot", "in/top": "../in", "in/hard": "content of ./dot",
		"in/" + strings.Repeat("long/", 40) + "\xff": "content of " + strings.Repeat("long/", 40) + "\xff",
	} {
		if got[path].content != content {
			t.Errorf("%q: %q", path, got[path].content)
		}
	}
	if n := got["in/ro"]; n.mode != fs.ModeDir|0o555 || !n.time.Equal(when) {
		t.Errorf("folder: %+v", n)
	}
	if n := got["in/ro/run.sh"]; n.mode != 0o755 || !n.time.Equal(when) {
		t.Errorf("file: %+v", n)
	}
	if _, ok := got["in/pax_global_header"]; ok {
		t.Error("a header became a file")
	}
}

func TestUnpackRefuses(t *testing.T) {
	t.Parallel()
	link := func(name, target string) tar.Header {
		return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}
	}
	for name, c := range map[string]struct {
		dir   string
		a     []tar.Header
		flags []string
		want  string
	}{
		"..":                          {"", []tar.Header{{Name: "../x"}}, nil, `"../x": it leads out`},
		".. in the middle":            {"", []tar.Header{{Name: "a/../x"}}, nil, `"a/../x": it has a part ..`},
		"absolute":                    {"", []tar.Header{{Name: "/etc/x"}}, nil, `"/etc/x": it leads out`},
		"a folder outside":            {"../s", []tar.Header{{Name: "x"}}, nil, `"../s"`},
		"an absolute link":            {"", []tar.Header{link("l", "/etc")}, nil, `"l": its target "/etc"`},
		"a link out":                  {"", []tar.Header{link("l", "../x")}, nil, `"l": its target "../x" leads, or may lead, out`},
		"a link out from below":       {"", []tar.Header{link("d/l", "../../x")}, nil, `"d/l": its target`},
		"links that add up":           {"", []tar.Header{link("b", "."), link("a", "b/..")}, nil, `"a": its target "b/.."`},
		"through a link":              {"", []tar.Header{link("l", "."), {Name: "l/x"}}, nil, `"l/x": "l" is in its way`},
		"a link below a link":         {"", []tar.Header{link("d", "."), link("d/l", "../x")}, nil, `"d/l": "d" is in its way`},
		"through the agent's link":    {"", []tar.Header{{Name: "agents/x"}}, nil, `"agents/x": "agents" is in its way`},
		"into the agent's link":       {"agents", []tar.Header{{Name: "x"}}, nil, `"agents"`},
		"a folder on a link":          {"", []tar.Header{{Name: "agents/", Typeflag: tar.TypeDir}}, nil, `"agents/": "agents" is in its way`},
		"a file on a folder":          {"", []tar.Header{{Name: "folder"}}, nil, `"folder": there is a folder`},
		"below a file":                {"", []tar.Header{{Name: "f"}, {Name: "f/x"}}, nil, `"f/x": "f" is in its way`},
		"a hard link to what is here": {"", []tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "agents"}}, nil, `"h": it is a hard link to "agents"`},
		"a hard link out":             {"", []tar.Header{{Name: "h", Typeflag: tar.TypeLink, Linkname: "../../x"}}, nil, `"h": it leads out`},
		"a device":                    {"", []tar.Header{{Name: "null", Typeflag: tar.TypeChar}}, nil, `"null": it is neither a file`},
		"a pipe":                      {"", []tar.Header{{Name: "pipe", Typeflag: tar.TypeFifo}}, nil, `"pipe": it is neither a file`},
		"too many entries":            {"", []tar.Header{{Name: "1"}, {Name: "2"}, {Name: "3"}}, []string{"--max-entries=2"}, `"3": the archive has more than 2 entries`},
		"too many bytes":              {"", []tar.Header{{Name: "1"}, {Name: "2"}}, []string{"--max-bytes=20"}, `"2": the archive's files have more than 20 bytes`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, outside := newBox(t), t.TempDir()
			put(t, b.workspace, "folder/x", "kept")
			if err := os.Symlink(outside, filepath.Join(b.workspace, "agents")); err != nil {
				t.Fatal(err)
			}
			before := len(tree(t, filepath.Dir(b.workspace)))
			b.flags = c.flags
			err := workspace.UnpackTar(t.Context(), b, c.dir, archive(t, c.a...))
			var refused *workspace.RefusedError
			if !errors.As(err, &refused) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if got := tree(t, outside); len(got) != 0 {
				t.Errorf("outside: %v", got)
			}
			inside := len(tree(t, b.workspace)) - 3 // folder, folder/x, agents
			if got := len(tree(t, filepath.Dir(b.workspace))); got != before+inside {
				t.Errorf("beside the workspace: %d entries more", got-before-inside)
			}
		})
	}
	t.Run("what is no tar", func(t *testing.T) {
		t.Parallel()
		whole := archive(t, tar.Header{Name: "a"}, tar.Header{Name: "b"}).Bytes()
		for name, raw := range map[string][]byte{"noise": []byte(strings.Repeat("noise", 1000)), "cut in a header": whole[:1024+100], "cut in a file": whole[:1024+512+3]} {
			err := workspace.UnpackTar(t.Context(), newBox(t), "", bytes.NewReader(raw))
			var refused *workspace.RefusedError
			if !errors.As(err, &refused) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// For any archive, no file is created outside.
func FuzzUnpack(f *testing.F) {
	for _, seed := range []string{"a", "../a", "d/l>../../x", "b>.\na>b/..\na/x", "l>.\nl/../x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, lines string) {
		var out bytes.Buffer
		w := tar.NewWriter(&out)
		for line := range strings.SplitSeq(lines, "\n") {
			name, target, isLink := strings.Cut(line, ">")
			h := &tar.Header{Name: name, Mode: 0o644, Typeflag: tar.TypeReg}
			if isLink {
				h.Typeflag, h.Linkname = tar.TypeSymlink, target
			}
			if w.WriteHeader(h) != nil {
				return
			}
		}
		if w.Close() != nil {
			return
		}
		dir := t.TempDir()
		inside := filepath.Join(dir, "in", "w")
		if err := os.MkdirAll(inside, 0o755); err != nil {
			t.Fatal(err)
		}
		u := snapshot.Unpacker{Workspace: inside, Dir: ".", MaxEntries: 100, MaxBytes: 1 << 20}
		_, _ = u.Run(t.Context(), &out) // refused or not
		if got := tree(t, dir); len(got) != 2+len(tree(t, inside)) {
			t.Errorf("%q: %v", lines, got)
		}
		// No link leads out either.
		_ = filepath.WalkDir(inside, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type() == fs.ModeSymlink {
				real, err := filepath.EvalSymlinks(path)
				if err == nil && real != inside && !strings.HasPrefix(real, inside+"/") {
					t.Errorf("%q: %s leads to %s", lines, path, real)
				}
			}
			return nil
		})
	})
}
