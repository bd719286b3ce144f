package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/aymanbagabas/go-udiff"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// Limits of a FilesDiff.
const (
	maxFilesDiff = 1000      // listed files
	maxTexts     = 100       // files with a text diff
	maxTextFile  = 256 << 10 // largest size in bytes of a file with a text diff
	maxTextBytes = 1 << 20   // total size in bytes of all text diffs
	maxSummed    = 64 << 20  // bytes read to compute SHA-256 sums
)

// Reasons why a FileDiff has no text.
const (
	omittedBinary   = "binary"
	omittedTooLarge = "too_large"
	omittedMode     = "mode"
	omittedCut      = "cut"
)

// diffFiles compares the snapshots of two events. A missing snapshot is not an error; the response then says what
// could not be compared.
func (s *Server) diffFiles(ctx context.Context, from, to reads.SessionState) (*spoolv1.FilesDiff, error) {
	out := &spoolv1.FilesDiff{}
	if from.Workspace != nil {
		out.FromSnapshotSeq, out.FromSnapshotSession = from.Workspace.Seq, ancestor(from, from.Workspace)
	}
	if to.Workspace == nil {
		out.Summary = fmt.Sprintf("No snapshot of the workspace had been taken at event %d.", to.Seq)
		return out, nil
	}
	out.ToSnapshotSeq, out.ToSnapshotSession = to.Workspace.Seq, ancestor(to, to.Workspace)
	if from.Workspace != nil && from.Workspace.Name == to.Workspace.Name {
		out.Summary = fmt.Sprintf("Both events have the same files, those of the snapshot of %s.", snapshotEvent(from))
		return out, nil
	}
	if err := admission.From(ctx).Take(admission.DiffCost); err != nil {
		return nil, err
	}
	d := filesDiff{out: out, left: maxSummed, text: maxTextBytes}
	for _, side := range []struct {
		state reads.SessionState
		field string
		to    **workspace.ContentReader
		list  *[]workspace.Entry
	}{{from, "from", &d.was, &d.before}, {to, "to", &d.is, &d.after}} {
		if side.state.Workspace == nil {
			continue
		}
		w, err := s.openSnapshot(ctx, side.state, side.field)
		var removed *problem.Error
		if errors.As(err, &removed) && removed.Code == problem.SnapshotGone {
			out.SnapshotGone, out.Summary = true, "The files cannot be compared: "+removed.Detail+"."
			return out, nil
		}
		if err == nil {
			*side.to = w.ContentReader(s.Objects)
			*side.list, err = w.List("")
		}
		if err != nil {
			return nil, err
		}
	}
	out.Summary = comparedSnapshots(from, to)
	return out, d.run(ctx)
}

// filesDiff compares the files of two snapshots of a session.
type filesDiff struct {
	out           *spoolv1.FilesDiff
	before, after []workspace.Entry
	was, is       *workspace.ContentReader
	texts         int   // number of text diffs so far
	text          int   // remaining bytes for text diffs
	left          int64 // remaining bytes to read for SHA-256 sums
}

// run walks both trees in parallel. It does not read files with equal blocks.
func (d *filesDiff) run(ctx context.Context) error {
	for len(d.before)+len(d.after) > 0 {
		var a, b *workspace.Entry
		order := 0
		switch {
		case len(d.before) == 0:
			order = 1
		case len(d.after) == 0:
			order = -1
		default:
			order = wire.ComparePaths(d.before[0].Path, d.after[0].Path)
		}
		if order <= 0 {
			a, d.before = &d.before[0], d.before[1:]
		}
		if order >= 0 {
			b, d.after = &d.after[0], d.after[1:]
		}
		if err := d.compareEntry(ctx, a, b); err != nil {
			return snapshotError(err)
		}
	}
	return nil
}

// compareEntry compares one path; nil means that the side has no entry at the path. Folders are ignored.
func (d *filesDiff) compareEntry(ctx context.Context, a, b *workspace.Entry) error {
	if a != nil && a.Kind == workspace.KindDir {
		a = nil
	}
	if b != nil && b.Kind == workspace.KindDir {
		b = nil
	}
	change, path := "changed", ""
	switch {
	case a == nil && b == nil, a != nil && b != nil && sameEntry(a, b):
		return nil
	case a == nil:
		change, path = "added", b.Path
	case b == nil:
		change, path = "removed", a.Path
	default:
		path = b.Path
	}
	if d.out.FileCount++; d.out.FileCount > maxFilesDiff {
		return nil
	}
	f := &spoolv1.FileDiff{Path: strings.ToValidUTF8(path, "\uFFFD"), Change: change, From: version(a), To: version(b)}
	d.out.Files = append(d.out.Files, f)
	omitted, err := d.setTextDiff(ctx, f, a, b)
	if omitted != "" {
		f.Omitted = &omitted
	}
	d.out.Cut = d.out.Cut || omitted == omittedCut
	return err
}

// sameEntry reports whether two entries are equal, ignoring their modification times.
func sameEntry(a, b *workspace.Entry) bool {
	return a.Kind == b.Kind && a.Size == b.Size && a.Mode == b.Mode && a.Target == b.Target && slices.Equal(a.Blocks, b.Blocks)
}

// version converts an entry to an API message, nil to nil.
func version(e *workspace.Entry) *spoolv1.FileVersion {
	if e == nil {
		return nil
	}
	v := &spoolv1.FileVersion{Kind: string(e.Kind), Size: float64(e.Size), Mode: e.Mode}
	if e.Kind == workspace.KindSymlink {
		target := strings.ToValidUTF8(e.Target, "\uFFFD")
		v.Target = &target
	}
	return v
}

// setTextDiff sets the text diff of the file f between its versions a and b, or returns the reason why it has none.
func (d *filesDiff) setTextDiff(ctx context.Context, f *spoolv1.FileDiff, a, b *workspace.Entry) (omitted string, err error) {
	if !isFile(a) && !isFile(b) || isFile(a) && isFile(b) && slices.Equal(a.Blocks, b.Blocks) {
		return omittedMode, nil
	}
	if tooLarge := func(e *workspace.Entry) bool { return isFile(e) && e.Size > maxTextFile }; tooLarge(a) || tooLarge(b) {
		return omittedTooLarge, d.setSums(ctx, f, a, b)
	}
	if d.texts == maxTexts || d.text == 0 {
		return omittedCut, nil
	}
	before, err := readWhole(ctx, d.was, a)
	if err != nil {
		return "", err
	}
	after, err := readWhole(ctx, d.is, b)
	if err != nil {
		return "", err
	}
	if !isText(before) || !isText(after) {
		return omittedBinary, d.setSums(ctx, f, a, b)
	}
	text := udiff.Unified(quoteName("a/"+f.Path), quoteName("b/"+f.Path), string(before), string(after))
	if len(text) > d.text {
		d.text = 0
		return omittedCut, nil
	}
	d.texts++
	d.text -= len(text)
	f.Text = &text
	return "", nil
}

// quoteName returns a file name for the header of a unified diff: in quotes if the name could be mistaken for lines of
// the diff.
func quoteName(name string) string {
	if strings.ContainsFunc(name, unicode.IsControl) || strings.ContainsAny(name, `"\`) {
		return strconv.Quote(name)
	}
	return name
}

func isFile(e *workspace.Entry) bool { return e != nil && e.Kind == workspace.KindFile }

// readWhole returns the whole content of a file, or nil if the entry is not a regular file. The file must be small.
func readWhole(ctx context.Context, from *workspace.ContentReader, e *workspace.Entry) ([]byte, error) {
	if !isFile(e) {
		return nil, nil
	}
	r, err := from.Reader(ctx, e.Path)
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(r)
	return data, errors.Join(err, r.Close())
}

func isText(data []byte) bool { return utf8.Valid(data) && bytes.IndexByte(data, 0) < 0 }

// setSums sets the SHA-256 of both versions of a file.
func (d *filesDiff) setSums(ctx context.Context, f *spoolv1.FileDiff, a, b *workspace.Entry) error {
	for _, side := range []struct {
		from *workspace.ContentReader
		e    *workspace.Entry
		to   *spoolv1.FileVersion
	}{{d.was, a, f.From}, {d.is, b, f.To}} {
		if !isFile(side.e) {
			continue
		}
		sum, err := d.sum(ctx, side.from, side.e)
		if err != nil {
			return err
		}
		if sum != "" {
			side.to.Sha256 = &sum
		}
	}
	return nil
}

// sum returns the SHA-256 of a file in hex. It has to read files of more than one block, and returns "" once all calls together have read
// maxSummed bytes.
func (d *filesDiff) sum(ctx context.Context, from *workspace.ContentReader, e *workspace.Entry) (string, error) {
	if len(e.Blocks) == 1 {
		return e.Blocks[0].String(), nil
	}
	if e.Size > d.left {
		return "", nil
	}
	d.left -= e.Size
	r, err := from.Reader(ctx, e.Path)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, err = io.Copy(h, r)
	return hex.EncodeToString(h.Sum(nil)), errors.Join(err, r.Close())
}
