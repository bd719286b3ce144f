package builtin

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/model"
)

// Transcript is the conversation of an agent session, in memory and in a file with one message in JSON on each line.
type Transcript struct {
	ID       string // the agent's own session id
	path     string
	file     *os.File
	messages []model.Message
	bytes    int64
}

// openTranscript opens the transcript of the agent session resume, or begins a new one with a new id if resume is "".
func openTranscript(state, resume string) (*Transcript, error) {
	t, create := &Transcript{ID: resume}, 0
	if resume == "" {
		t.ID, create = "agt-"+rand.Text(), os.O_CREATE
	}
	var err error
	if t.path, err = transcriptPath(state, t.ID); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(t.path), 0o700); err != nil {
		return nil, fmt.Errorf("make transcript folder: %w", err)
	}
	if t.file, err = os.OpenFile(t.path, os.O_RDWR|create, 0o600); err != nil {
		return nil, fmt.Errorf("open the transcript of session %s: %w", t.ID, err)
	}
	if err := t.readMessages(); err != nil {
		return nil, errors.Join(err, t.file.Close())
	}
	return t, nil
}

// readMessages reads the messages from the file. It removes a last line that was cut by a crash, so that further
// messages begin on a new line.
func (t *Transcript) readMessages() error {
	in := bufio.NewReader(t.file)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read transcript: %w", err)
		}
		var m model.Message
		if err := json.Unmarshal(line, &m); err != nil {
			return fmt.Errorf("transcript %s, line %d: %w", t.path, len(t.messages)+1, err)
		}
		t.messages = append(t.messages, m)
		t.bytes += int64(len(line))
	}
	if err := t.file.Truncate(t.bytes); err != nil {
		return fmt.Errorf("repair transcript: %w", err)
	}
	if _, err := t.file.Seek(t.bytes, io.SeekStart); err != nil {
		return fmt.Errorf("repair transcript: %w", err)
	}
	return t.answerOpenCalls("the agent's process ended before the call was finished")
}

// AppendMessage appends a message to the conversation and to the file.
func (t *Transcript) AppendMessage(m model.Message) error {
	raw, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode transcript: %w", err)
	}
	t.messages = append(t.messages, m)
	n, err := t.file.Write(append(raw, '\n'))
	t.bytes += int64(n)
	if err != nil {
		return fmt.Errorf("write transcript: %w", err)
	}
	return nil
}

// Messages returns the messages of the conversation. The caller must not change them.
func (t *Transcript) Messages() []model.Message { return t.messages }

// answerOpenCalls appends a result with the text "[reason]" for each tool call of the last answer that has no result, because every model API
// requires one.
func (t *Transcript) answerOpenCalls(reason string) error {
	for _, c := range model.OpenCalls(t.messages) {
		if err := t.AppendMessage(model.Message{Role: model.RoleTool, CallID: c.ID, Text: "[" + reason + "]"}); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the file of the transcript.
func (t *Transcript) Close() error { return t.file.Close() }
