package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Protocol is the version of the protocol that host and runner state in their Hello.
const Protocol = 1

// MaxFrame is the maximum size of a frame's content in bytes: the entry of the largest file has a hash for each block.
const MaxFrame = 2 << 20

// Type is the type of a frame between host and runner.
type Type byte

// The types of frames. One side sends frames until it sends one that passes the turn or ends the stream.
//
// Snapshot: the host sends Hello; the runner sends Hello and Found. If the host has that snapshot, it sends Stop;
// otherwise it sends Known frames and Go. The runner then sends entries in order, each after those of its blocks that
// the host does not have, and End. The runner reports skipped files with the entries, or before a Found with an id.
//
// Snapshot with edits, if both sides set Edits in their Hello: the runner sends Hello and Found. The host sends Known
// frames if Found asks for them, and Go. The runner then sends entries and paths that are gone, each entry after those
// of its blocks that the host does not have, in any order, and End. They change the tree that Found names as its base;
// without a base they are the whole tree. When the snapshot is stored, the host sends Named.
//
// Restore: the host sends Hello, all entries in order and Go, each block once, and End; the runner sends Hello, and
// End when all files are in place.
const (
	FrameHello Type = 'H' // Hello
	FrameFound Type = 'F' // Found
	FrameStop  Type = 'S' // empty
	FrameKnown Type = 'K' // hashes, one after the other
	FrameGo    Type = 'G' // empty
	FrameBlock Type = 'B' // a block's bytes
	FrameEntry Type = 'E' // Entry
	FrameSkip  Type = 'R' // Skip
	FrameGone  Type = 'D' // the path of an entry that is gone, with everything below it
	FrameEnd   Type = 'Z' // End
	FrameNamed Type = 'N' // Named
)

// Hello is the first frame that each side of a stream sends.
type Hello struct {
	Protocol int `json:"protocol"`
	// Edits is set by a side that supports snapshots with edits. Earlier builds ignore it.
	Edits bool `json:"edits,omitempty"`
	// Base is the id of the snapshot that the host can apply edits to; "" for none.
	Base string `json:"base,omitempty"`
	// Full requests a walk over all files.
	Full bool `json:"full,omitempty"`
}

// Found describes the tree as far as the runner knows it before it has read any content.
type Found struct {
	ID    string `json:"id,omitempty"` // "" if the id is known only after reading content
	Files uint32 `json:"files,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"`
	// Base is the id of the snapshot that the edits change; "" if the runner sends the whole tree. Only with edits.
	Base string `json:"base,omitempty"`
	// Known is set if the runner asks for the hashes of the blocks that the host has. Only with edits.
	Known bool `json:"known,omitempty"`
}

// Named states the id of the snapshot that the host has stored.
type Named struct {
	ID string `json:"id"`
}

// Skip is a file that is not in the snapshot, and the reason.
type Skip struct {
	Path   string `json:"path"` // bytes that are not UTF-8 are replaced
	Reason Reason `json:"reason"`
}

// Reason is the reason why a file is not in a snapshot.
type Reason string

// The reasons.
const (
	Unreadable  Reason = "unreadable"    // its mode forbids reading, or the disk failed
	Special     Reason = "special"       // a socket, a device or a pipe
	TooLarge    Reason = "too_large"     // larger than MaxFileSize
	TooDeep     Reason = "too_deep"      // nested in more folders than a snapshot may have
	OverLimit   Reason = "over_limit"    // only in a folder of the host: the file, or all files together, exceed the limits of such a snapshot
	PathTooLong Reason = "path_too_long" // its path, or a link's target, is longer than MaxPath
)

// End is the last frame of a stream. A stream without it is incomplete.
type End struct {
	ID    string `json:"id,omitempty"` // with edits only after a full walk
	Files uint32 `json:"files"`
	Bytes uint64 `json:"bytes"` // total size of all files
	Read  uint64 `json:"read,omitempty"`
	Full  bool   `json:"full,omitempty"` // all files were looked at; ID, Files and Bytes are set. Only with edits.
	// Missed is the number of folders in which a full walk found changes that the watcher of the files had not reported.
	Missed uint32 `json:"missed,omitempty"`
}

// Exit codes of the runner's commands snapshot, restore and unpack. No other command of the runner uses them.
const (
	ExitDiskFull = 5 // the sandbox has no room for the content
	ExitRefused  = 6 // the archive is invalid
)

// ErrCut is returned for a stream that ended before its frame End.
var ErrCut = errors.New("the stream was cut off before its end")

const headerLen = 5

// Writer writes frames to a stream through a buffer. Call Flush before waiting for the other side. An error of the
// stream wraps ErrCut. A Writer is not safe for concurrent use.
type Writer struct{ w *bufio.Writer }

// NewWriter returns a Writer that writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{bufio.NewWriterSize(w, 64<<10)} }

// Frame writes a frame of type t. It returns an error if content is longer than MaxFrame.
func (w *Writer) Frame(t Type, content []byte) error {
	if len(content) > MaxFrame {
		return fmt.Errorf("frame %c: %d bytes are more than %d", t, len(content), MaxFrame)
	}
	head := [headerLen]byte{byte(t)}
	binary.BigEndian.PutUint32(head[1:], uint32(len(content))) //nolint:gosec // bounded above
	if _, err := w.w.Write(head[:]); err != nil {
		return cut(err)
	}
	if _, err := w.w.Write(content); err != nil {
		return cut(err)
	}
	return nil
}

// Entry writes a frame that contains e.
func (w *Writer) Entry(e *Entry) error {
	line, err := e.Line()
	if err != nil {
		return err
	}
	return w.Frame(FrameEntry, line)
}

// JSON writes a frame that contains v as JSON.
func (w *Writer) JSON(t Type, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.Frame(t, raw)
}

// Flush sends the buffered frames.
func (w *Writer) Flush() error {
	if err := w.w.Flush(); err != nil {
		return cut(err)
	}
	return nil
}

// Reader reads frames from a stream. It is not safe for concurrent use.
type Reader struct {
	r   *bufio.Reader
	buf []byte
}

// NewReader returns a Reader that reads from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: bufio.NewReaderSize(r, 64<<10)} }

// Next returns the next frame, whose content is valid until the next call. At the end of the stream it returns an
// error that wraps ErrCut, because a reader must stop at End.
func (r *Reader) Next() (Type, []byte, error) {
	var head [headerLen]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return 0, nil, cut(err)
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("frame header %q is invalid: the other side is not a runner or host of this version", head[:])
	}
	if int(n) > cap(r.buf) {
		r.buf = make([]byte, max(int(n), min(2*cap(r.buf), MaxFrame)))
	}
	r.buf = r.buf[:n]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return 0, nil, cut(err)
	}
	return Type(head[0]), r.buf, nil
}

// Expect reads the next frame, which must have type t, and decodes its JSON content into v unless v is nil.
func (r *Reader) Expect(t Type, v any) error {
	got, content, err := r.Next()
	if err != nil {
		return err
	}
	if got != t {
		return Unexpected(got)
	}
	if v == nil {
		return nil
	}
	return Decode(t, content, v)
}

// Greet reads the other side's Hello and returns an error if the protocol versions differ.
func (r *Reader) Greet() (h Hello, err error) {
	if err := r.Expect(FrameHello, &h); err != nil {
		return h, err
	}
	if h.Protocol != Protocol {
		return h, fmt.Errorf("the other side uses protocol %d, this side %d: runner and host must have the same version", h.Protocol, Protocol)
	}
	return h, nil
}

// Decode decodes the JSON content of a frame of type t into v.
func Decode(t Type, content []byte, v any) error {
	if err := json.Unmarshal(content, v); err != nil {
		return fmt.Errorf("frame %c: %w", t, err)
	}
	return nil
}

// Unexpected returns the error for a frame whose type the protocol does not allow at this point.
func Unexpected(t Type) error { return fmt.Errorf("unexpected frame %q", byte(t)) }

func cut(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.ErrClosedPipe) {
		return ErrCut
	}
	return fmt.Errorf("%w: %w", ErrCut, err)
}
