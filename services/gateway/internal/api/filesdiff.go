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
	maxDiffFiles     = 1000      // listed files
	maxTextDiffs     = 100       // files with a text diff
	maxTextFileBytes = 256 << 10 // largest size in bytes of a file with a text diff
	maxTextDiffBytes = 1 << 20   // total size in bytes of all text diffs
	maxHashedBytes   = 64 << 20  // bytes read to compute SHA-256 sums
)

// Reasons why a FileDiff has no text.
const (
	textOmittedBinary    = "binary"
	textOmittedTooLarge  = "too_large"
	textOmittedModeOnly  = "mode"
	textOmittedOverTotal = "cut"
)

// diffFiles compares the files of the snapshots that two states of a session name. A missing snapshot is not an
// error; the response then describes what could not be compared.
func (s *Server) diffFiles(ctx context.Context, from, to reads.SessionState) (*spoolv1.FilesDiff, error) {
	out := &spoolv1.FilesDiff{}
	if from.Workspace != nil {
		out.FromSnapshotSeq, out.FromSnapshotSession = from.Workspace.Seq, snapshotAncestor(from, from.Workspace)
	}
	if to.Workspace == nil {
		out.Summary = fmt.Sprintf("No snapshot of the workspace had been taken at event %d.", to.Seq)
		return out, nil
	}
	out.ToSnapshotSeq, out.ToSnapshotSession = to.Workspace.Seq, snapshotAncestor(to, to.Workspace)
	if from.Workspace != nil && from.Workspace.Name == to.Workspace.Name {
		out.Summary = fmt.Sprintf("Both events have the same files, those of the snapshot of %s.", snapshotEventPhrase(from))
		return out, nil
	}
	if err := admission.From(ctx).ReserveBytes(admission.SnapshotDiffCost); err != nil {
		return nil, err
	}
	d := filesComparison{out: out, left: maxHashedBytes, text: maxTextDiffBytes}
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
	return out, d.compareTrees(ctx)
}

// filesComparison compares the files of two snapshots of a session.
type filesComparison struct {
	out           *spoolv1.FilesDiff
	before, after []workspace.Entry
	was, is       *workspace.ContentReader
	texts         int   // number of text diffs so far
	text          int   // remaining bytes for text diffs
	left          int64 // remaining bytes to read for SHA-256 sums
}

// compareTrees walks the trees of both snapshots in parallel and compares each path. It does not read the content of
// files whose stored blocks are equal.
func (d *filesComparison) compareTrees(ctx context.Context) error {
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

// compareEntry compares the entries a and b of one path in two snapshots; nil means that a snapshot has no entry at
// the path. It ignores folders.
func (d *filesComparison) compareEntry(ctx context.Context, a, b *workspace.Entry) error {
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
	if d.out.FileCount++; d.out.FileCount > maxDiffFiles {
		return nil
	}
	f := &spoolv1.FileDiff{Path: strings.ToValidUTF8(path, "\uFFFD"), Change: change, From: fileVersion(a), To: fileVersion(b)}
	d.out.Files = append(d.out.Files, f)
	omitted, err := d.setTextDiff(ctx, f, a, b)
	if omitted != "" {
		f.Omitted = &omitted
	}
	d.out.Cut = d.out.Cut || omitted == textOmittedOverTotal
	return err
}

// sameEntry reports whether two workspace entries are equal, apart from their modification times.
func sameEntry(a, b *workspace.Entry) bool {
	return a.Kind == b.Kind && a.Size == b.Size && a.Mode == b.Mode && a.Target == b.Target && slices.Equal(a.Blocks, b.Blocks)
}

// fileVersion converts a workspace entry to an API message; it returns nil for nil.
func fileVersion(e *workspace.Entry) *spoolv1.FileVersion {
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
func (d *filesComparison) setTextDiff(ctx context.Context, f *spoolv1.FileDiff, a, b *workspace.Entry) (omitted string, err error) {
	if !isFile(a) && !isFile(b) || isFile(a) && isFile(b) && slices.Equal(a.Blocks, b.Blocks) {
		return textOmittedModeOnly, nil
	}
	if tooLarge := func(e *workspace.Entry) bool { return isFile(e) && e.Size > maxTextFileBytes }; tooLarge(a) || tooLarge(b) {
		return textOmittedTooLarge, d.setSHA256(ctx, f, a, b)
	}
	if d.texts == maxTextDiffs || d.text == 0 {
		return textOmittedOverTotal, nil
	}
	before, err := readWholeFile(ctx, d.was, a)
	if err != nil {
		return "", err
	}
	after, err := readWholeFile(ctx, d.is, b)
	if err != nil {
		return "", err
	}
	if !isText(before) || !isText(after) {
		return textOmittedBinary, d.setSHA256(ctx, f, a, b)
	}
	text := udiff.Unified(quoteFileName("a/"+f.Path), quoteFileName("b/"+f.Path), string(before), string(after))
	if len(text) > d.text {
		d.text = 0
		return textOmittedOverTotal, nil
	}
	d.texts++
	d.text -= len(text)
	f.Text = &text
	return "", nil
}

// quoteFileName returns a file name for the header of a unified diff: in quotes if the name could be mistaken for lines of
// the diff.
func quoteFileName(name string) string {
	if strings.ContainsFunc(name, unicode.IsControl) || strings.ContainsAny(name, `"\`) {
		return strconv.Quote(name)
	}
	return name
}

// isFile reports whether a workspace entry is a regular file.
func isFile(e *workspace.Entry) bool { return e != nil && e.Kind == workspace.KindFile }

// readWholeFile returns the whole content of a file of a snapshot, or nil if the entry is not a regular file. The
// file must be small.
func readWholeFile(ctx context.Context, from *workspace.ContentReader, e *workspace.Entry) ([]byte, error) {
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

// isText reports whether content is text, which a diff can show.
func isText(data []byte) bool { return utf8.Valid(data) && bytes.IndexByte(data, 0) < 0 }

// setSHA256 sets the SHA-256 of the two versions of a file in its FileDiff.
func (d *filesComparison) setSHA256(ctx context.Context, f *spoolv1.FileDiff, a, b *workspace.Entry) error {
	for _, side := range []struct {
		from *workspace.ContentReader
		e    *workspace.Entry
		to   *spoolv1.FileVersion
	}{{d.was, a, f.From}, {d.is, b, f.To}} {
		if !isFile(side.e) {
			continue
		}
		sum, err := d.fileSHA256(ctx, side.from, side.e)
		if err != nil {
			return err
		}
		if sum != "" {
			side.to.Sha256 = &sum
		}
	}
	return nil
}

// fileSHA256 returns the SHA-256 of a file of a snapshot in hex. It has to read a file of more than one block, and
// returns "" once all calls together have read maxHashedBytes bytes.
func (d *filesComparison) fileSHA256(ctx context.Context, from *workspace.ContentReader, e *workspace.Entry) (string, error) {
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
