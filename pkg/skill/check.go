package skill

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
)

// Check reads the whole ZIP of a skill and validates it. An invalid ZIP is an *Error. Limits bound its running time,
// and SKILL.md and the names bound its memory.
func Check(ctx context.Context, r io.ReaderAt, size int64, lim Limits) (Metadata, error) {
	a, err := openArchive(ctx, r, size, lim)
	if err != nil {
		return Metadata{}, err
	}
	found := a.found
	found.Bytes = uint64(size) //nolint:gosec // a length
	err = a.forEachFile(ctx, func(_ *zipEntry, content io.Reader) error {
		n, err := io.Copy(io.Discard, content)
		found.Files++
		found.UnpackedBytes += uint64(n) //nolint:gosec // a count
		return err
	})
	if err != nil {
		return Metadata{}, err
	}
	found.Digest, err = sha256Of(ctx, r, size)
	return found, err
}

// sha256Of returns the SHA-256 of a ZIP in hex.
func sha256Of(ctx context.Context, r io.ReaderAt, size int64) (string, error) {
	h := sha256.New()
	n, err := io.Copy(h, &contextReader{ctx, io.NewSectionReader(r, 0, size)})
	if err == nil && n != size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return "", fmt.Errorf("read the ZIP: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// contextReader is a reader that fails when ctx has ended.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (w *contextReader) Read(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	return w.r.Read(p)
}
