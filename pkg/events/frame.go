package events

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
)

// A frame is a message of DELTAS: deltas of sessions of one partition that an executor published together. Its first
// line is "frame 1 " and the frame's number. Two lines follow for each delta: the tenant, the session and the length in
// bytes of the delta's JSON, separated by spaces, and then the JSON. So a reader skips deltas of other sessions without
// decoding them.

// framePrefix is the beginning of every frame. The number in it is the version of the format.
const framePrefix = "frame 1 "

// errNotFrame is returned for a message that is not a frame of deltas.
var errNotFrame = errors.New("message is not a frame of deltas")

// FrameSubject returns the NATS subject on which an executor publishes the frames of a partition.
func FrameSubject(partition int, executor string) string {
	return "dl." + PartitionToken(partition) + "." + executor
}

// FrameExecutor returns the executor of a FrameSubject. ok is false for another subject.
func FrameExecutor(subject string) (executor string, ok bool) {
	rest, ok := strings.CutPrefix(subject, "dl.")
	_, executor, found := strings.Cut(rest, ".")
	return executor, ok && found && executor != "" && !strings.Contains(executor, ".")
}

// FrameSessionKey returns the key that identifies a session in a frame.
func FrameSessionKey(tenant, session string) string { return tenant + " " + session }

// AppendFrameHeader begins a frame with its number. An executor numbers the frames of a partition 1, 2, 3, …, so that a
// reader notices a lost one.
func AppendFrameHeader(b []byte, number uint64) []byte {
	return append(strconv.AppendUint(append(b, framePrefix...), number, 10), '\n')
}

// AppendFrameDelta adds a delta, as JSON, to a frame. key is the FrameSessionKey of the delta's session.
func AppendFrameDelta(b []byte, key string, delta []byte) []byte {
	b = append(append(b, key...), ' ')
	b = append(strconv.AppendUint(b, uint64(len(delta)), 10), '\n')
	return append(append(b, delta...), '\n')
}

// FrameNumber returns the number that the header of a frame states.
func FrameNumber(frame []byte) (uint64, error) {
	number, _, err := splitFrame(frame)
	return number, err
}

// splitFrame divides a frame into its number and its deltas.
func splitFrame(frame []byte) (number uint64, deltas []byte, err error) {
	rest, ok := bytes.CutPrefix(frame, []byte(framePrefix))
	line, deltas, found := bytes.Cut(rest, []byte("\n"))
	number, parseErr := strconv.ParseUint(string(line), 10, 64)
	if !ok || !found || parseErr != nil {
		return 0, nil, errNotFrame
	}
	return number, deltas, nil
}

// FrameDeltas iterates over the deltas of a frame: the FrameSessionKey of each, and its JSON for DecodeDelta. Both refer to
// the bytes of the frame. An error is the last value: the frame is damaged from there on.
func FrameDeltas(frame []byte) iter.Seq2[FrameDelta, error] {
	return func(yield func(FrameDelta, error) bool) {
		_, rest, err := splitFrame(frame)
		if err != nil {
			yield(FrameDelta{}, err)
			return
		}
		for len(rest) > 0 {
			line, after, found := bytes.Cut(rest, []byte("\n"))
			i := bytes.LastIndexByte(line, ' ')
			if !found || i < 0 {
				yield(FrameDelta{}, fmt.Errorf("%w: a delta has no session and length", errNotFrame))
				return
			}
			n, err := strconv.Atoi(string(line[i+1:]))
			if err != nil || n < 0 || n >= len(after) || after[n] != '\n' {
				yield(FrameDelta{}, fmt.Errorf("%w: a delta has another length than the frame states", errNotFrame))
				return
			}
			if !yield(FrameDelta{Session: line[:i], JSON: after[:n:n]}, nil) {
				return
			}
			rest = after[n+1:]
		}
	}
}

// FrameDelta is a delta as a frame contains it.
type FrameDelta struct {
	Session []byte // FrameSessionKey of the delta's session
	JSON    []byte
}
