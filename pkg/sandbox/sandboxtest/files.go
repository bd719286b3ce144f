package sandboxtest

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// testFilesPutGet checks that Put and Get transfer content unchanged, and that an interrupted upload leaves no file.
func testFilesPutGet(f *fixture) {
	files := f.createSandbox(f.newSpec()).Files()
	body := make([]byte, 3<<20)
	_, err := rand.Read(body)
	f.failOnError(err)
	for name, content := range map[string][]byte{"a": []byte("1"), "b/c/d.txt": body, "empty": nil, "späce and ünicode": []byte("2"), "./dot": []byte("3")} {
		f.failOnError(files.Put(f.ctx, name, bytes.NewReader(content)))
		f.checkContent(files, name, content)
	}
	f.failOnError(files.Put(f.ctx, "a", strings.NewReader("replaced")))
	f.checkContent(files, "a", []byte("replaced"))
	_, err = files.Get(f.ctx, "nothing")
	f.checkError(err, sandbox.ErrNotFound)
	_, err = files.Get(f.ctx, "b/nothing")
	f.checkError(err, sandbox.ErrNotFound)
	if _, err := files.Get(f.ctx, "b"); err == nil {
		f.Error("a folder was opened as a file")
	}
	broken := errors.New("the upload broke off")
	f.checkError(files.Put(f.ctx, "a", io.MultiReader(strings.NewReader("half"), errReader{broken})), broken)
	f.checkContent(files, "a", []byte("replaced"))
	all, err := files.List(f.ctx, "")
	f.failOnError(err)
	if len(all) != 7 {
		f.Errorf("a broken upload left files: %+v", all)
	}
}

// errReader is a reader that returns err.
type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

// checkContent fails the test unless a file of the workspace has the content want.
func (f *fixture) checkContent(files sandbox.Files, name string, want []byte) {
	f.Helper()
	r, err := files.Get(f.ctx, name)
	f.failOnError(err)
	got, err := io.ReadAll(r)
	f.failOnError(errors.Join(err, r.Close()))
	if !bytes.Equal(got, want) {
		f.Errorf("%s has %d bytes, want %d", name, len(got), len(want))
	}
}

// testFilesList checks the entries of the workspace and of a folder, and their order.
func testFilesList(f *fixture) {
	files := f.createSandbox(f.newSpec()).Files()
	empty, err := files.List(f.ctx, "")
	f.failOnError(err)
	if len(empty) != 0 {
		f.Errorf("a new workspace has %+v", empty)
	}
	for _, name := range []string{"z", "a/b", "a/c/d", "a-b"} {
		f.failOnError(files.Put(f.ctx, name, strings.NewReader("12345")))
	}
	paths := func(dir string) string {
		f.Helper()
		got, err := files.List(f.ctx, dir)
		f.failOnError(err)
		var out []string
		for _, e := range got {
			if !e.Dir && (e.Size != 5 || time.Since(e.ModTime) > waitTimeout) {
				f.Errorf("entry %+v", e)
			}
			out = append(out, e.Path+map[bool]string{true: "/"}[e.Dir])
		}
		return strings.Join(out, " ")
	}
	if got := paths(""); got != "a/ a-b a/b a/c/ a/c/d z" {
		f.Errorf("all: %s", got)
	}
	if got := paths("a"); got != "a/b a/c/ a/c/d" {
		f.Errorf("a: %s", got)
	}
	_, err = files.List(f.ctx, "nothing")
	f.checkError(err, sandbox.ErrNotFound)
}

// testFilesOutside checks that no file outside the workspace can be written or read.
func testFilesOutside(f *fixture) {
	files := f.createSandbox(f.newSpec()).Files()
	for _, name := range []string{"../x", "..", "a/../../x", "/etc/passwd", "a/../../workspace-evil/x"} {
		f.checkError(files.Put(f.ctx, name, strings.NewReader("x")), sandbox.ErrOutsideWorkspace)
		_, err := files.Get(f.ctx, name)
		f.checkError(err, sandbox.ErrOutsideWorkspace)
		_, err = files.List(f.ctx, name)
		f.checkError(err, sandbox.ErrOutsideWorkspace)
	}
	for _, name := range []string{"", "nul\x00", "."} {
		if err := files.Put(f.ctx, name, strings.NewReader("x")); err == nil {
			f.Errorf("%q was written", name)
		}
	}
}

// testFilesSymlinks checks that files behind links are neither written, read nor listed if the links lead outside.
func testFilesSymlinks(f *fixture) {
	box := f.createSandbox(f.newSpec())
	files := box.Files()
	f.failOnError(files.Put(f.ctx, "inside", strings.NewReader("in")))
	_, _, code := f.runShell(box, `ln -s /etc/passwd file && ln -s / root && ln -s .. up && ln -s inside good && ln -s "$(pwd)-evil" sibling && { mkdir -p "$(pwd)-evil" || true; }`)
	if code != 0 {
		f.Fatal("creating the symlinks in the sandbox failed")
	}
	defer f.runShell(box, `rm -r "$(pwd)-evil"`)
	f.checkContent(files, "good", []byte("in"))
	for _, name := range []string{"file", "root/etc/passwd", "up/x", "sibling/x"} {
		_, err := files.Get(f.ctx, name)
		f.checkError(err, sandbox.ErrOutsideWorkspace)
	}
	for _, name := range []string{"root/tmp/spool-evil", "up/evil", "sibling/evil", "sibling/new/evil"} {
		f.checkError(files.Put(f.ctx, name, strings.NewReader("evil")), sandbox.ErrOutsideWorkspace)
	}
	// Put onto a symlink replaces the link, not the file to which it points.
	f.failOnError(files.Put(f.ctx, "file", strings.NewReader("mine")))
	f.checkContent(files, "file", []byte("mine"))
	all, err := files.List(f.ctx, "")
	f.failOnError(err)
	if len(all) > 6 {
		f.Errorf("the listing follows symlinks: %d entries", len(all))
	}
}

// testFilesRemove checks that Remove removes files and folders, and nothing outside the workspace.
func testFilesRemove(f *fixture) {
	box := f.createSandbox(f.newSpec())
	files := box.Files()
	for _, name := range []string{"a/b", "a/c/d", "e", "kept"} {
		f.failOnError(files.Put(f.ctx, name, strings.NewReader("x")))
	}
	if _, _, code := f.runShell(box, `ln -s kept link && ln -s / root && ln -s .. up && mkdir -p "$HOME/mine" && ln -s "$HOME/mine" out && touch "$HOME/mine/file" && mkdir empty`); code != 0 {
		f.Fatal("creating the links in the sandbox failed")
	}
	for _, name := range []string{"nothing", "a/nothing", "kept/nothing"} {
		err := files.Remove(f.ctx, name)
		if err == nil || errors.Is(err, sandbox.ErrOutsideWorkspace) || name != "kept/nothing" && !errors.Is(err, sandbox.ErrNotFound) {
			f.Errorf("remove %s: %v", name, err)
		}
	}
	for _, name := range []string{"../x", "..", "/etc/passwd", "a/../../x", "root/etc/passwd", "up/x", "out/file"} {
		f.checkError(files.Remove(f.ctx, name), sandbox.ErrOutsideWorkspace)
	}
	for _, name := range []string{"", ".", "nul\x00"} {
		if err := files.Remove(f.ctx, name); err == nil {
			f.Errorf("%q was removed", name)
		}
	}
	// Remove removes a link itself, not the file to which it points.
	for _, name := range []string{"a", "e", "link", "root", "up", "out", "empty"} {
		f.failOnError(files.Remove(f.ctx, name))
	}
	left, err := files.List(f.ctx, "")
	f.failOnError(err)
	if len(left) != 1 || left[0].Path != "kept" {
		f.Errorf("remaining files: %+v", left)
	}
	if _, _, code := f.runShell(box, `test -e "$HOME/mine/file" && test -e /etc/passwd`); code != 0 {
		f.Error("the target of a link was removed")
	}
}

// testListOutside checks that listings do not follow those links out of the workspace that testFilesSymlinks leaves
// out.
func testListOutside(f *fixture) {
	box := f.createSandbox(f.newSpec())
	if _, _, code := f.runShell(box, `mkdir -p in/side && touch in/side/file && ln -s / root && ln -s .. up && ln -s in alias && ln -s "$(pwd)/in" absolute`); code != 0 {
		f.Fatal("creating the links in the sandbox failed")
	}
	for _, name := range []string{"root", "root/etc", "up", "root/proc/self/cwd"} {
		if _, err := box.Files().List(f.ctx, name); !errors.Is(err, sandbox.ErrOutsideWorkspace) {
			// The listing of a link may succeed, but it must contain nothing below the link.
			if got, _ := box.Files().List(f.ctx, name); err != nil || len(got) > 0 {
				f.Errorf("list %s: %d entries, %v", name, len(got), err)
			}
		}
	}
	for _, name := range []string{"root", "up"} {
		_, err := box.Exec(f.ctx, sandbox.Command{Args: []string{"pwd"}, Dir: name + "/etc"})
		f.checkError(err, sandbox.ErrOutsideWorkspace)
	}
	if out, _, code := f.runCommand(box, sandbox.Command{Args: []string{"ls"}, Dir: "alias/side"}, ""); out != "file\n" || code != 0 {
		f.Errorf("in a folder behind a link that stays inside: %q, code %d", out, code)
	}
}
