package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// errCut is the error that is journaled with a line of which a value was too long and was cut.
var errCut = errors.New("longer than a line may be; it was cut")

// cutNote is appended to the text of a block that the runner cut because it was too long.
const cutNote = "\n[cut by the runner: too long]"

// blockText is the text of a block: known holds its complete runes so far, of which the first sent bytes are in the
// journal, and half holds the beginning of an incomplete rune. The text is already redacted, so offsets count redacted
// bytes.
type blockText struct {
	redact *redact.Stream
	known  []byte
	sent   int
	half   []byte
	cut    bool
	typed  *[]byte // for the input of a call: the JSON text as it was written, because its decoded form is redacted separately
}

// add adds a piece, and keeps the beginning of an incomplete rune at its end for the next piece.
func (x *blockText) add(piece string) {
	if x.cut {
		return
	}
	b := append(x.half, piece...)
	whole := len(b) - incompleteRune(b)
	x.half = bytes.Clone(b[whole:])
	x.addUnredacted(bytes.ToValidUTF8(b[:whole], []byte("\uFFFD")))
}

// finish drops an incomplete rune and releases text that was held back for redaction.
func (x *blockText) finish() {
	if len(x.half) > 0 && !x.cut {
		x.addUnredacted([]byte("\uFFFD"))
	}
	x.half = nil
	if rest := x.redact.Close(); !x.cut {
		x.addRedacted(rest)
	}
}

// addUnredacted passes b to the redaction, and adds the redacted text that is complete.
func (x *blockText) addUnredacted(b []byte) {
	if x.typed != nil && len(*x.typed) <= maxText {
		*x.typed = append(*x.typed, b...)
	}
	x.addRedacted(x.redact.Write(b))
}

// addRedacted adds redacted text. If the text gets too long, addRedacted cuts it and adds cutNote.
func (x *blockText) addRedacted(b []byte) {
	if len(x.known)+len(b) > maxText {
		b = truncate.Prefix(b, maxText-len(x.known))
		b = append(bytes.Clone(b), cutNote...)
		x.cut = true
	}
	x.known = append(x.known, b...)
}

// waiting reports whether a part of the text is not journaled yet.
func (x *blockText) waiting() bool { return x.sent < len(x.known) }

// takePiece returns the next piece of the text for the journal, of at most limit bytes and whole runes, and its offset
// in the text.
func (x *blockText) takePiece(limit int) (uint32, string) {
	piece := truncate.Prefix(x.known[x.sent:], limit)
	offset := uint32(x.sent) //nolint:gosec // at most maxText and the note
	x.sent += len(piece)
	return offset, string(piece)
}

// put stores the text in the field of the block that it belongs to.
func (x *blockText) put(b *events.Block) {
	if len(x.known) == 0 {
		return
	}
	switch b.Kind {
	case events.KindToolUse:
		// Input that is not complete JSON is left out.
		if len(b.Input) == 0 && len(*x.typed) <= maxText && json.Valid(*x.typed) {
			b.Input = bytes.Clone(*x.typed)
		}
	case events.KindToolResult, events.KindSubagent:
		b.Output = string(x.known)
	default:
		b.Content = string(x.known)
	}
}

// incompleteRune returns the length of the incomplete rune at the end of b.
func incompleteRune(b []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(b); n++ {
		if tail := b[len(b)-n:]; utf8.RuneStart(tail[0]) {
			if utf8.FullRune(tail) {
				return 0
			}
			return n
		}
	}
	return 0
}

// applyUpdates sets the fields of an open block that an update contains.
func applyUpdates(b *events.Block, u events.BlockUpdates) {
	if len(u.Input) > 0 {
		b.Input = u.Input
	}
	for _, f := range []struct{ from, to *string }{
		{u.DisplayName, &b.DisplayName}, {u.Description, &b.Description}, {u.Summary, &b.Summary}, {u.Output, &b.Output},
	} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
	if u.Todos != nil {
		b.Todos = u.Todos
	}
}

// encodeLine encodes the data of a journal line as valid UTF-8 JSON. If the result is too long for a line, encodeLine
// cuts long texts in data; cut reports whether it did.
func encodeLine(data any) (raw json.RawMessage, cut bool, err error) {
	for _, limit := range []int{maxText + len(cutNote), maxText / 8} {
		small, wasCut := shorten(data, limit)
		raw, err := encode(small)
		if err != nil {
			return nil, false, err
		}
		cut = cut || wasCut
		if len(raw) <= runner.MaxLineLength-(16<<10) { // room for the line around it
			return raw, cut, nil
		}
		cut = true
	}
	return nil, true, errCut
}

// encode returns JSON without HTML escapes. Invalid UTF-8 becomes U+FFFD, also inside raw messages, which
// encoding/json does not check.
func encode(data any) (json.RawMessage, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(data); err != nil {
		return nil, err
	}
	return bytes.ToValidUTF8(bytes.TrimSuffix(buf.Bytes(), []byte("\n")), []byte("\uFFFD")), nil
}

// shorten cuts the fields of data whose length the agent determines to limit bytes, and reports whether any was longer
// or was not valid JSON.
func shorten(data any, limit int) (any, bool) {
	cut := false
	long := func(fields ...*string) {
		for _, f := range fields {
			if len(*f) > limit {
				*f, cut = truncate.Prefix(*f, limit-len(cutNote))+cutNote, true
			}
		}
	}
	raw := func(m *json.RawMessage) {
		clean, ok := cleanJSON(*m)
		*m = clean
		if cut = cut || !ok; len(*m) > limit {
			*m, cut = json.RawMessage(`{"cut":"too long to be kept"}`), true
		}
	}
	block := func(b *events.Block) {
		b.Description = truncate.Text(b.Description, maxDescription)
		if len(b.Anchor) > maxAnchor {
			b.Anchor = "" // a part of it would be another position, or none
		}
		long(&b.Content, &b.Summary, &b.Output, &b.Message, &b.DisplayName, &b.Name, &b.ToolName, &b.ToolUseID)
		raw(&b.Input)
	}
	switch d := data.(type) {
	case events.BlockStart:
		block(&d.Block)
		data = d
	case events.BlockComplete:
		block(&d.Block)
		data = d
	case events.BlockUpdate:
		for _, f := range []**string{&d.Updates.DisplayName, &d.Updates.Summary, &d.Updates.Output} {
			if *f != nil {
				s := strings.Clone(**f)
				long(&s)
				*f = &s
			}
		}
		if d.Updates.Description != nil {
			s := truncate.Text(*d.Updates.Description, maxDescription)
			d.Updates.Description = &s
		}
		raw(&d.Updates.Input)
		data = d
	case events.Log:
		d.Message = Beginning(d.Message, maxLog)
		data = d
	case events.Error:
		long(&d.Message)
		data = d
	case events.SubagentSpawned:
		long(&d.Prompt, &d.Name)
		data = d
	case events.PermissionDecided:
		long(&d.Reason, &d.ToolName, &d.ToolUseID)
		data = d
	case runner.TurnEnd:
		long(&d.Result, &d.Message)
		data = d
	}
	return data, cut
}

// cleanJSON returns a value that every JSON reader accepts: unpaired surrogates become U+FFFD. It returns false for a
// value that is not JSON.
func cleanJSON(m json.RawMessage) (json.RawMessage, bool) {
	if len(m) == 0 {
		return nil, true
	}
	if !json.Valid(m) {
		return nil, false
	}
	if !bytes.Contains(m, []byte(`\ud`)) && !bytes.Contains(m, []byte(`\uD`)) {
		return m, true
	}
	var v any
	dec := json.NewDecoder(bytes.NewReader(m))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		return nil, false
	}
	clean, err := encode(v)
	return clean, err == nil
}
