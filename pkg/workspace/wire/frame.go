package wire

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// ProtocolVersion is the version of the snapshot protocol that host and runner state in their Hello.
const ProtocolVersion = 1

// MaxFrameSize is the maximum size of a frame's content in bytes: the entry of the largest file has a hash for each block.
const MaxFrameSize = 2 << 20

// FrameType is the type of a frame, which is one message of the snapshot protocol between host and runner.
type FrameType byte

// The types of frames. One side sends frames until it sends one that passes the turn or ends the stream.
//
// Snapshot: the host sends Hello; the runner sends Hello and FoundTree. If the host has that snapshot, it sends Stop;
// otherwise it sends Known frames and Go. The runner then sends entries in order, each after those of its blocks that
// the host does not have, and End. The runner reports skipped files with the entries, or before a FoundTree with an id.
//
// Snapshot with edits, if both sides set Edits in their Hello: the runner sends Hello and FoundTree. The host sends Known
// frames if FoundTree asks for them, and Go. The runner then sends entries and removed paths, each entry after those
// of its blocks that the host does not have, in any order, and End. They change the tree that FoundTree names as its base;
// without a base they are the whole tree. When the snapshot is stored, the host sends StoredSnapshot.
//
// Restore: the host sends Hello, all entries in order and Go, each block once, and End; the runner sends Hello, and
// End when all files are in place.
const (
	FrameHello          FrameType = 'H' // Hello
	FrameFoundTree      FrameType = 'F' // FoundTree
	FrameStop           FrameType = 'S' // empty
	FrameKnownHashes    FrameType = 'K' // hashes, one after the other
	FrameGo             FrameType = 'G' // empty
	FrameBlock          FrameType = 'B' // a block's bytes
	FrameEntry          FrameType = 'E' // Entry
	FrameSkippedFile    FrameType = 'R' // SkippedFile
	FrameRemoved        FrameType = 'D' // the path of a removed entry, below which everything is removed too
	FrameEnd            FrameType = 'Z' // End
	FrameStoredSnapshot FrameType = 'N' // StoredSnapshot
)

// Hello is the first frame that host and runner send to each other.
type Hello struct {
	Protocol int `json:"protocol"`
	// Edits is set by a side that supports snapshots with edits. Earlier builds ignore it.
	Edits bool `json:"edits,omitempty"`
	// Base is the id of the snapshot that the host can apply edits to; "" for none.
	Base string `json:"base,omitempty"`
	// Full requests a walk over all files.
	Full bool `json:"full,omitempty"`
}

// FoundTree is the frame in which the runner describes the tree as far as it knows the tree before it has read any
// content.
type FoundTree struct {
	ID    string `json:"id,omitempty"` // "" if the id is known only after reading content
	Files uint32 `json:"files,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"`
	// Base is the id of the snapshot that the edits change; "" if the runner sends the whole tree. Only with edits.
	Base string `json:"base,omitempty"`
	// Known is set if the runner asks for the hashes of the blocks that the host has. Only with edits.
	Known bool `json:"known,omitempty"`
}

// StoredSnapshot is the frame in which the host states the id of the snapshot that it has stored.
type StoredSnapshot struct {
	ID string `json:"id"`
}

// SkippedFile is the frame in which the runner reports a file that is not in the snapshot, and the reason.
type SkippedFile struct {
	Path   string     `json:"path"` // bytes that are not UTF-8 are replaced
	Reason SkipReason `json:"reason"`
}

// SkipReason is the reason why a file is not in a snapshot.
type SkipReason string

// The reasons.
const (
	SkipUnreadable  SkipReason = "unreadable"    // its mode forbids reading, or the disk failed
	SkipSpecial     SkipReason = "special"       // a socket, a device or a pipe
	SkipTooLarge    SkipReason = "too_large"     // larger than MaxFileSize
	SkipTooDeep     SkipReason = "too_deep"      // nested in more folders than a snapshot may have
	SkipOverLimit   SkipReason = "over_limit"    // only in a folder of the host: the file, or all files together, exceed the limits of such a snapshot
	SkipPathTooLong SkipReason = "path_too_long" // its path, or a link's target, is longer than MaxPathLength
)

// End is the last frame of a snapshot or restore stream. A stream without it is incomplete.
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
	ExitDiskFull   = 5 // the sandbox has no room for the content
	ExitTarRefused = 6 // the archive is invalid
)

// ErrStreamCut is returned for a stream that ended before its frame End.
var ErrStreamCut = errors.New("the stream was cut off before its end")

const frameHeaderLength = 5

// Writer writes frames to a stream through a buffer. The caller must call Flush before it waits for the other side. An
// error of the stream wraps ErrStreamCut. A Writer is not safe for concurrent use.
type Writer struct{ w *bufio.Writer }

// NewWriter returns a Writer that writes to w.
func NewWriter(w io.Writer) *Writer { return &Writer{bufio.NewWriterSize(w, 64<<10)} }

// WriteFrame writes a frame of type t. It returns an error if content is longer than MaxFrameSize.
func (w *Writer) WriteFrame(t FrameType, content []byte) error {
	if len(content) > MaxFrameSize {
		return fmt.Errorf("frame %c: %d bytes are more than %d", t, len(content), MaxFrameSize)
	}
	head := [frameHeaderLength]byte{byte(t)}
	binary.BigEndian.PutUint32(head[1:], uint32(len(content))) //nolint:gosec // bounded above
	if _, err := w.w.Write(head[:]); err != nil {
		return wrapCutError(err)
	}
	if _, err := w.w.Write(content); err != nil {
		return wrapCutError(err)
	}
	return nil
}

// WriteEntry writes a frame that contains the entry e.
func (w *Writer) WriteEntry(e *Entry) error {
	line, err := e.CanonicalLine()
	if err != nil {
		return err
	}
	return w.WriteFrame(FrameEntry, line)
}

// WriteJSON writes a frame that contains v as WriteJSON.
func (w *Writer) WriteJSON(t FrameType, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return w.WriteFrame(t, raw)
}

// Flush sends the buffered frames.
func (w *Writer) Flush() error {
	if err := w.w.Flush(); err != nil {
		return wrapCutError(err)
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

// Next returns the next frame, whose content is valid until the next call. At the end of the stream it returns an error
// that wraps ErrStreamCut, because a reader must stop at the frame End.
func (r *Reader) Next() (FrameType, []byte, error) {
	var head [frameHeaderLength]byte
	if _, err := io.ReadFull(r.r, head[:]); err != nil {
		return 0, nil, wrapCutError(err)
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > MaxFrameSize {
		return 0, nil, fmt.Errorf("frame header %q is invalid: the other side is not a runner or host of this version", head[:])
	}
	if int(n) > cap(r.buf) {
		r.buf = make([]byte, max(int(n), min(2*cap(r.buf), MaxFrameSize)))
	}
	r.buf = r.buf[:n]
	if _, err := io.ReadFull(r.r, r.buf); err != nil {
		return 0, nil, wrapCutError(err)
	}
	return FrameType(head[0]), r.buf, nil
}

// Expect reads the next frame, which must have type t, and decodes its JSON content into v unless v is nil.
func (r *Reader) Expect(t FrameType, v any) error {
	got, content, err := r.Next()
	if err != nil {
		return err
	}
	if got != t {
		return UnexpectedFrameError(got)
	}
	if v == nil {
		return nil
	}
	return DecodeFrame(t, content, v)
}

// ReadHello reads the other side's Hello and returns an error if the protocol versions differ.
func (r *Reader) ReadHello() (h Hello, err error) {
	if err := r.Expect(FrameHello, &h); err != nil {
		return h, err
	}
	if h.Protocol != ProtocolVersion {
		return h, fmt.Errorf("the other side uses protocol %d, this side %d: runner and host must have the same version", h.Protocol, ProtocolVersion)
	}
	return h, nil
}

// DecodeFrame decodes the JSON content of a frame of type t into v.
func DecodeFrame(t FrameType, content []byte, v any) error {
	if err := json.Unmarshal(content, v); err != nil {
		return fmt.Errorf("frame %c: %w", t, err)
	}
	return nil
}

// UnexpectedFrameError returns the error for a frame whose type the protocol does not allow at this point.
func UnexpectedFrameError(t FrameType) error { return fmt.Errorf("unexpected frame %q", byte(t)) }

// wrapCutError wraps an error of the stream so that it is ErrStreamCut.
func wrapCutError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.ErrClosedPipe) {
		return ErrStreamCut
	}
	return fmt.Errorf("%w: %w", ErrStreamCut, err)
}
