package skill

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Constants of the ZIP format, see PKWARE's APPNOTE.
const (
	centralHeaderSignature = 0x02014b50 // in the central directory
	localHeaderSignature   = 0x04034b50 // before an entry's content
	endRecordSignature     = 0x06054b50

	centralHeaderLength = 46
	localHeaderLength   = 30
	endRecordLength     = 22

	methodStore   = 0
	methodDeflate = 8

	// refusedFlags are the flags for encrypted content, patch data, strong encryption and masked headers. A ZIP that has an entry with
	// one of them is refused.
	refusedFlags = 1<<0 | 1<<5 | 1<<6 | 1<<13

	creatorUnix  = 3
	creatorMacOS = 19

	extraFieldUnix = 0x000d // PKWARE: a link or device has data after the fixed part
	extraFieldASi  = 0x756e // mode, device and the target of a link

	// refusedAttributes are the DOS attributes volume label, device and reparse point. A ZIP that has an entry with one of them is
	// refused.
	refusedAttributes = 0x08 | 0x40 | 0x400
)

// Types of a file in a Unix mode.
const (
	unixTypeMask   = 0o170000
	unixTypeFolder = 0o040000
	unixTypeFile   = 0o100000
	unixExecutable = 0o111
)

// zipEntry is a file or a folder in the central directory of a ZIP.
type zipEntry struct {
	raw    string // name as in the ZIP
	name   string // without the trailing slash of a folder
	folder bool
	run    bool // has an execute bit
	flags  uint16
	method uint16
	crc    uint32
	packed int64 // size of its content in the ZIP
	size   int64 // unpacked size according to the ZIP
	offset int64 // offset of its local header
	data   int64 // offset of its content
}

// readDirectory reads the central directory of a ZIP and validates each entry separately.
func readDirectory(r io.ReaderAt, size int64, lim Limits) ([]zipEntry, error) {
	if size > lim.Packed {
		return nil, tooLargeError("has %d bytes; the limit is %d", size, lim.Packed)
	}
	at, length, count, err := readEndRecord(r, size)
	if err != nil {
		return nil, err
	}
	in := bufio.NewReaderSize(io.NewSectionReader(r, at, length), 64<<10)
	var list []zipEntry
	files, folders := 0, 0
	for range count {
		e, used, err := readEntry(in)
		if err != nil {
			return nil, err
		}
		if length -= used; length < 0 {
			return nil, zipError("the directory is longer than the end record states")
		}
		if e.folder {
			folders++
		} else {
			files++
		}
		if files > lim.Files {
			return nil, tooLargeError("has more than %d files", lim.Files)
		}
		if folders > lim.Files {
			return nil, tooLargeError("has more than %d folders", lim.Files)
		}
		list = append(list, e)
	}
	if length != 0 {
		return nil, zipError("the directory is shorter than the end record states")
	}
	return list, locateContents(r, list, at)
}

// readEndRecord finds the end record of a ZIP and returns the position of the central directory. The directory must end
// where the record begins, and nothing may follow the record.
func readEndRecord(r io.ReaderAt, size int64) (at, length int64, count int, err error) {
	tail := make([]byte, min(size, endRecordLength+1<<16))
	if err := readAt(r, tail, size-int64(len(tail))); err != nil {
		return 0, 0, 0, err
	}
	i := bytes.LastIndex(tail, binary.LittleEndian.AppendUint32(nil, endRecordSignature))
	if i < 0 || len(tail)-i < endRecordLength {
		return 0, 0, 0, zipError("is not a ZIP, or its end is missing")
	}
	end := tail[i:]
	u16, u32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	if int(u16(end[20:]))+endRecordLength != len(end) {
		return 0, 0, 0, zipError("has data after the end record")
	}
	if u16(end[10:]) == 1<<16-1 || u32(end[12:]) == 1<<32-1 || u32(end[16:]) == 1<<32-1 {
		return 0, 0, 0, zipError("is a ZIP64, which is not supported: no ZIP within the limits needs it")
	}
	if u16(end[4:]) != 0 || u16(end[6:]) != 0 || u16(end[8:]) != u16(end[10:]) {
		return 0, 0, 0, zipError("is a part of a split ZIP")
	}
	count, length, at = int(u16(end[10:])), int64(u32(end[12:])), int64(u32(end[16:]))
	if at+length != size-int64(len(end)) {
		return 0, 0, 0, zipError("the directory is not at the offset that the end record states")
	}
	return at, length, count, nil
}

// readEntry reads the next entry of the central directory; used is the entry's length in bytes.
func readEntry(in *bufio.Reader) (e zipEntry, used int64, err error) {
	var h [centralHeaderLength]byte
	if err := readFull(in, h[:]); err != nil {
		return e, 0, err
	}
	u16, u32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	if u32(h[:]) != centralHeaderSignature {
		return e, 0, zipError("the directory is damaged")
	}
	nameLen, extraLen, commentLen := int(u16(h[28:])), int(u16(h[30:])), int(u16(h[32:]))
	rest := make([]byte, nameLen+extraLen)
	if err := readFull(in, rest); err != nil {
		return e, 0, err
	}
	if _, err := in.Discard(commentLen); err != nil {
		return e, 0, classifyReadError(err)
	}
	e = zipEntry{
		raw: string(rest[:nameLen]), flags: u16(h[8:]), method: u16(h[10:]), crc: u32(h[16:]),
		packed: int64(u32(h[20:])), size: int64(u32(h[24:])), offset: int64(u32(h[42:])),
	}
	creator, attributes := h[5], u32(h[38:])
	e.run = (creator == creatorUnix || creator == creatorMacOS) && attributes>>16&unixExecutable != 0
	if e.name, e.folder, err = checkEntryPath(e.raw); err == nil {
		err = e.check(attributes, rest[nameLen:])
	}
	if err == nil && u16(h[34:]) != 0 {
		err = zipError("is a part of a split ZIP")
	}
	return e, int64(centralHeaderLength + len(rest) + commentLen), err
}

// check validates an entry's file type, compression method and stated sizes.
func (e *zipEntry) check(attributes uint32, extra []byte) error {
	switch kind := attributes >> 16 & unixTypeMask; {
	case kind != 0 && kind != unixTypeFile && kind != unixTypeFolder, attributes&refusedAttributes != 0:
		return refusedEntryError(e.raw, "is a link, a device or similar; only files and folders are allowed")
	case kind == unixTypeFolder && !e.folder, kind == unixTypeFile && e.folder:
		return refusedEntryError(e.raw, "is a folder by its name or by its mode, but not by both")
	}
	if err := e.checkExtra(extra); err != nil {
		return err
	}
	switch {
	case e.flags&refusedFlags != 0:
		return entryZIPError(e.raw, "is encrypted or a patch; only plain files are supported")
	case e.method != methodStore && e.method != methodDeflate:
		return entryZIPError(e.raw, "has compression method %d; only store (0) and deflate (8) are supported", e.method)
	case e.packed == 1<<32-1 || e.size == 1<<32-1 || e.offset == 1<<32-1:
		return entryZIPError(e.raw, "needs ZIP64, which is not supported")
	case e.method == methodStore && e.packed != e.size:
		return entryZIPError(e.raw, "is stored without compression, but its two sizes differ")
	case e.folder && e.size != 0:
		return entryZIPError(e.raw, "is a folder with content")
	}
	return nil
}

// checkExtra returns an error for links and devices that only the extra fields describe. All other extra fields,
// valid or not, are ignored.
func (e *zipEntry) checkExtra(extra []byte) error {
	link := refusedEntryError(e.raw, "is a link or a device; only files and folders are allowed")
	for len(extra) >= 4 {
		id, n := binary.LittleEndian.Uint16(extra), int(binary.LittleEndian.Uint16(extra[2:]))
		if extra = extra[4:]; n > len(extra) {
			return nil
		}
		switch field := extra[:n]; {
		case id == extraFieldUnix && n > 12: // preceded by two times and two owners
			return link
		case id == extraFieldASi && n > 14:
			return link
		case id == extraFieldASi && n >= 6:
			if kind := binary.LittleEndian.Uint16(field[4:]) & unixTypeMask; kind != 0 && kind != unixTypeFile && kind != unixTypeFolder {
				return link
			}
		}
		extra = extra[n:]
	}
	return nil
}

// locateContents reads the local headers of a ZIP, which must match the central directory, and returns an error if the
// contents of entries overlap.
func locateContents(r io.ReaderAt, list []zipEntry, directory int64) error {
	order := make([]*zipEntry, len(list))
	for i := range list {
		if err := list[i].locateContent(r, directory); err != nil {
			return err
		}
		order[i] = &list[i]
	}
	sortBy(order, func(e *zipEntry) int64 { return e.offset })
	for i, e := range order {
		limit := directory
		if i+1 < len(order) {
			limit = order[i+1].offset
		}
		if e.data+e.packed > limit {
			return entryZIPError(e.raw, "overlaps the data after it")
		}
	}
	return nil
}

// locateContent finds the offset of the entry's content in the ZIP.
func (e *zipEntry) locateContent(r io.ReaderAt, directory int64) error {
	var h [localHeaderLength]byte
	if e.offset+localHeaderLength > directory {
		return entryZIPError(e.raw, "is not at the offset that the directory states")
	}
	if err := readAt(r, h[:], e.offset); err != nil {
		return err
	}
	u16, u32 := binary.LittleEndian.Uint16, binary.LittleEndian.Uint32
	if u32(h[:]) != localHeaderSignature {
		return entryZIPError(e.raw, "is not at the offset that the directory states")
	}
	nameLen, extraLen := int64(u16(h[26:])), int64(u16(h[28:]))
	e.data = e.offset + localHeaderLength + nameLen + extraLen
	if e.data > directory {
		return entryZIPError(e.raw, "is not at the offset that the directory states")
	}
	rest := make([]byte, nameLen+extraLen)
	if err := readAt(r, rest, e.offset+localHeaderLength); err != nil {
		return err
	}
	if string(rest[:nameLen]) != e.raw || u16(h[8:]) != e.method || u16(h[6:])&refusedFlags != 0 {
		return entryZIPError(e.raw, "has a local header that differs from the directory")
	}
	return e.checkExtra(rest[nameLen:])
}

// readAt fills b with the bytes of a ZIP at an offset.
func readAt(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if n == len(b) {
		return nil
	}
	return classifyReadError(err)
}

func readFull(in io.Reader, b []byte) error {
	if _, err := io.ReadFull(in, b); err != nil {
		return classifyReadError(err)
	}
	return nil
}

// classifyReadError returns an *Error if a read reached the end of the ZIP too early, and otherwise err with context.
func classifyReadError(err error) error {
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return zipError("is cut off")
	}
	return fmt.Errorf("read the ZIP: %w", err)
}
