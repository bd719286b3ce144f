package skill

import (
	"bufio"
	"compress/flate"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strings"
)

// zipArchive is the ZIP of a skill with a valid directory and SKILL.md. The other files have not been read yet.
type zipArchive struct {
	r       io.ReaderAt
	size    int64
	lim     Limits
	files   []zipEntry // by name
	folders []string   // by name; a folder precedes its content
	found   Metadata   // contents of SKILL.md
}

// openArchive validates the central directory and SKILL.md of a skill's ZIP.
func openArchive(ctx context.Context, r io.ReaderAt, size int64, lim Limits) (*zipArchive, error) {
	a := &zipArchive{r: r, size: size, lim: lim.withDefaults()}
	list, err := readDirectory(r, size, a.lim)
	if err != nil {
		return nil, err
	}
	if a.folders, err = checkPaths(list, a.lim); err != nil {
		return nil, err
	}
	var total int64
	for _, e := range list {
		total += e.size
		if err := a.checkSize(&e, e.size, total); err != nil {
			return nil, err
		}
		if !e.folder {
			a.files = append(a.files, e)
		}
	}
	sortBy(a.files, func(e zipEntry) string { return e.name })
	return a, a.readDocument(ctx)
}

// checkSize returns an error if an entry, or all entries together, unpack to more than the limits allow.
func (a *zipArchive) checkSize(e *zipEntry, size, total int64) error {
	switch {
	case total > a.lim.Unpacked:
		return tooLargeError("unpacks to more than %d bytes", a.lim.Unpacked)
	case size > ratioExemptSize && size > a.lim.Ratio*e.packed:
		return &Error{CodeTooLarge, "zip", e.raw, fmt.Sprintf("unpacks to more than %d times its size", a.lim.Ratio)}
	case total > ratioExemptSize && total > a.lim.Ratio*a.size:
		return tooLargeError("unpacks to more than %d times its size", a.lim.Ratio)
	}
	return nil
}

// readDocument reads SKILL.md from the ZIP, where it must be at the root.
func (a *zipArchive) readDocument(ctx context.Context) error {
	hint := ""
	for i := range a.files {
		e := &a.files[i]
		switch base := e.name[max(0, len(e.name)-len(DocumentName)):]; {
		case e.name == DocumentName && e.size > a.lim.Document:
			return documentError("", "has %d bytes; the limit is %d", e.size, a.lim.Document)
		case e.name == DocumentName:
			text, err := io.ReadAll(a.unpacker(ctx).openFile(e))
			if err != nil {
				return err
			}
			a.found.Document = string(text)
			a.found.Name, a.found.Description, err = readDocument(a.found.Document)
			return err
		case hint == "" && strings.EqualFold(base, DocumentName):
			hint = "; found " + quoteName(e.name) + ": zip the content of its folder, and write the name in upper case"
		}
	}
	return documentError("", "is not at the root of the ZIP%s", hint)
}

// unpacker unpacks the files of a skill's ZIP one after another.
type unpacker struct {
	ctx     context.Context
	a       *zipArchive
	in      *bufio.Reader
	inflate io.ReadCloser
	total   int64 // number of unpacked bytes
}

func (a *zipArchive) unpacker(ctx context.Context) *unpacker {
	in := bufio.NewReaderSize(nil, 64<<10)
	return &unpacker{ctx: ctx, a: a, in: in, inflate: flate.NewReader(in)}
}

// openFile returns the unpacked content of a file. It ends the reading of the previous file.
func (u *unpacker) openFile(e *zipEntry) *fileContent {
	u.in.Reset(io.NewSectionReader(u.a.r, e.data, e.packed))
	c := &fileContent{u: u, e: e, from: u.in}
	if e.method == methodDeflate {
		c.err = u.inflate.(flate.Resetter).Reset(u.in, nil)
		c.from = u.inflate
	}
	return c
}

// forEachFile calls fn for every file of the ZIP in the order of names. fn must read the content to its end. Reading
// fails if the content does not match the central directory.
func (a *zipArchive) forEachFile(ctx context.Context, fn func(e *zipEntry, content io.Reader) error) error {
	u := a.unpacker(ctx)
	for i := range a.files {
		e := &a.files[i]
		c := u.openFile(e)
		if err := fn(e, c); err != nil {
			return err
		}
		if !errors.Is(c.err, io.EOF) { // the checksum is verified at the end
			return fmt.Errorf("entry %s was not read to its end", quoteName(e.name))
		}
	}
	return nil
}

// fileContent reads the unpacked content of a file in a ZIP, counts its bytes and verifies its checksum.
type fileContent struct {
	u    *unpacker
	e    *zipEntry
	from io.Reader
	n    int64
	crc  uint32
	err  error // the result of the next Read; io.EOF once everything is verified
}

func (c *fileContent) Read(p []byte) (int, error) {
	if err := c.u.ctx.Err(); err != nil {
		return 0, err
	}
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.from.Read(p)
	c.n += int64(n)
	c.u.total += int64(n)
	c.crc = crc32.Update(c.crc, crc32.IEEETable, p[:n])
	if c.err = c.readError(err); c.err != nil && !errors.Is(c.err, io.EOF) {
		return 0, c.err
	}
	return n, c.err
}

// readError converts an error of the decompressor into the error that Read returns.
func (c *fileContent) readError(err error) error {
	if c.n > c.e.size {
		return entryZIPError(c.e.raw, "unpacks to more than the stated %d bytes", c.e.size)
	}
	if err := c.u.a.checkSize(c.e, c.n, c.u.total); err != nil {
		return err
	}
	var corrupt flate.CorruptInputError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &corrupt), errors.Is(err, io.ErrUnexpectedEOF):
		return entryZIPError(c.e.raw, "is damaged: unpacking failed")
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("read the ZIP: %w", err)
	case c.n != c.e.size:
		return entryZIPError(c.e.raw, "unpacks to %d bytes instead of the stated %d", c.n, c.e.size)
	case c.crc != c.e.crc:
		return entryZIPError(c.e.raw, "is damaged: the checksum does not match")
	}
	return io.EOF
}
