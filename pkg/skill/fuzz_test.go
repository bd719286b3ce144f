package skill_test

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/skill"
	"github.com/spoolhq/spool/pkg/skill/skilltest"
)

// corpus returns ZIPs that are accepted, and all invalid ZIPs except the largest.
func corpus() (list [][]byte) {
	list = append(list, sampleZIP(), skilltest.BuildZIP(skilltest.DocumentEntry()))
	for _, b := range slices.Concat(skilltest.UnsafeEntryZIPs(), skilltest.ForgedArchives(), skilltest.InvalidDocumentZIPs()) {
		if len(b.ZIP) < 64<<10 {
			list = append(list, b.ZIP)
		}
	}
	return list
}

// FuzzCheck tests that no ZIP causes a panic, and that a ZIP that Check accepts is extracted inside the folder, with
// the counts that Check returned, and with the content that the standard library reads.
func FuzzCheck(f *testing.F) {
	for _, z := range corpus() {
		f.Add(z)
	}
	lim := skill.Limits{Files: 200, Packed: 1 << 20, Unpacked: 4 << 20}
	f.Fuzz(func(t *testing.T, z []byte) {
		checkAgreement(t, z, lim)
		checkAgreement(t, repaired(z), lim)
	})
}

// repaired returns a ZIP whose end record has correct offsets, so that the fuzzer also reaches the code behind the
// check of the end record.
func repaired(z []byte) []byte {
	i := bytes.LastIndex(z, []byte("PK\x05\x06"))
	if i < 0 || len(z)-i < 22 {
		return z
	}
	z = bytes.Clone(z[:i+22])
	dir := bytes.Index(z, []byte("PK\x01\x02"))
	if dir < 0 || dir > i {
		return z
	}
	binary.LittleEndian.PutUint32(z[i+12:], uint32(i-dir)) //nolint:gosec // the values are small
	binary.LittleEndian.PutUint32(z[i+16:], uint32(dir))   //nolint:gosec // the values are small
	binary.LittleEndian.PutUint16(z[i+20:], 0)
	return z
}

func checkAgreement(t *testing.T, z []byte, lim skill.Limits) {
	t.Helper()
	found, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), lim)
	if err != nil {
		var refused *skill.Error
		if !errors.As(err, &refused) {
			t.Fatalf("not refused: %v", err)
		}
		return
	}
	parent := skillsFolder(t)
	dir, err := skill.Extract(t.Context(), bytes.NewReader(z), int64(len(z)), filepath.Join(parent, "skills"), found.Digest)
	must(t, err)
	laid := contents(t, dir)
	var size uint64
	for _, text := range laid {
		size += uint64(len(text))
	}
	if len(laid) != int(found.Files) || size != found.UnpackedBytes || laid["SKILL.md"] != found.Document {
		t.Errorf("%d files of %d bytes, %+v", len(laid), size, found)
	}
	if all, err := os.ReadDir(parent); err != nil || len(all) != 1 {
		t.Errorf("files outside of the folder: %v, %v", all, err)
	}
	r, err := zip.NewReader(bytes.NewReader(z), int64(len(z)))
	must(t, err)
	others := 0
	for _, e := range r.File {
		if strings.HasSuffix(e.Name, "/") {
			continue
		}
		others++
		from, err := e.Open()
		must(t, err)
		text, err := io.ReadAll(from)
		if have, ok := laid[e.Name]; err != nil || !ok || have != string(text) {
			t.Errorf("archive/zip reads %q differently: %v", e.Name, err)
		}
	}
	if others != len(laid) {
		t.Errorf("archive/zip has %d files, Check %d", others, len(laid))
	}
}

// contents returns the files of a folder.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(path)
		out[filepath.ToSlash(rel)] = string(text)
		return err
	}))
	return out
}

// skillsFolder returns a folder for skills. It makes the read-only skills writable at the end, so that a user other than root
// can remove them.
func skillsFolder(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Cleanup(func() {
		must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				err = os.Chmod(path, 0o700) //nolint:gosec // a folder of the test
			}
			return err
		}))
	})
	return dir
}

// TestCheck_AgreesWithTheStandardLibrary runs the checks of FuzzCheck over well-formed ZIPs whose names and kinds may
// be invalid.
func TestCheck_AgreesWithTheStandardLibrary(t *testing.T) {
	t.Parallel()
	element := rapid.SampledFrom([]string{"a", "A", "b", "é", "e\u0301", "É", "..", ".", "", "c:", "x y", "\u202e", "SKILL.md", "skill.md"})
	taken := 0
	rapid.Check(t, func(r *rapid.T) {
		items := []skilltest.ZIPEntry{skilltest.DocumentEntry()}
		for range rapid.IntRange(0, 5).Draw(r, "entries") {
			it := skilltest.FileEntry(strings.Join(rapid.SliceOfN(element, 1, 3).Draw(r, "path"), "/"), rapid.StringN(0, 50, 200).Draw(r, "content"))
			it.Raw = rapid.Bool().Draw(r, "raw")
			it.Mode = rapid.SampledFrom([]uint32{0, 0o100644, 0o100755, 0o104755, 0o120777}).Draw(r, "mode")
			items = append(items, it)
		}
		z := skilltest.BuildZIP(items...)
		if _, err := skill.Check(t.Context(), bytes.NewReader(z), int64(len(z)), skill.Limits{}); err == nil {
			taken++
		}
		t.Run("", func(t *testing.T) { checkAgreement(t, z, skill.Limits{}) })
	})
	if taken < 20 {
		t.Errorf("only %d ZIPs were accepted", taken)
	}
}

// TestQuoted_IsABomb tests that archive/zip unpacks Fifield's bomb. Otherwise its refusal would prove nothing.
func TestQuoted_IsABomb(t *testing.T) {
	t.Parallel()
	z := skilltest.QuotedHeaderBomb(20, 60<<10)
	r, err := zip.NewReader(bytes.NewReader(z), int64(len(z)))
	must(t, err)
	total := 0
	for _, e := range r.File {
		from, err := e.Open()
		must(t, err)
		text, err := io.ReadAll(from)
		must(t, err)
		total += len(text)
	}
	if total < 100*len(z) {
		t.Errorf("%d bytes become %d", len(z), total)
	}
}
