package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// errLineTooLong is journaled as an error event before a line in which a value was cut, because the line was too long.
var errLineTooLong = errors.New("longer than a line may be; it was cut")

// truncationNote is appended to the text of a block that the runner cut because it was too long.
const truncationNote = "\n[cut by the runner: too long]"

// Limits of a plan. A plan of this size fits into a line even if every byte is escaped.
const (
	maxPlanItems   = 500
	maxPlanContent = 1 << 10 // bytes of the content of an item
	maxPlanWord    = 256     // bytes of the id and of the priority of an item
)

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

// appendPiece appends a piece of text, and keeps an incomplete rune at the end of the piece until the next piece.
func (x *blockText) appendPiece(piece string) {
	if x.cut {
		return
	}
	b := append(x.half, piece...)
	whole := len(b) - incompleteRune(b)
	x.half = bytes.Clone(b[whole:])
	x.appendUnredacted(bytes.ToValidUTF8(b[:whole], []byte("\uFFFD")))
}

// finish replaces an incomplete rune at the end by U+FFFD, and appends the text that the redaction still held back.
func (x *blockText) finish() {
	if len(x.half) > 0 && !x.cut {
		x.appendUnredacted([]byte("\uFFFD"))
	}
	x.half = nil
	if rest := x.redact.Close(); !x.cut {
		x.appendRedacted(rest)
	}
}

// appendUnredacted passes b to the redaction, and appends the text that the redaction releases.
func (x *blockText) appendUnredacted(b []byte) {
	if x.typed != nil && len(*x.typed) <= maxTextField {
		*x.typed = append(*x.typed, b...)
	}
	x.appendRedacted(x.redact.Write(b))
}

// appendRedacted appends redacted text. If the text gets longer than maxTextField, appendRedacted cuts it and appends
// truncationNote.
func (x *blockText) appendRedacted(b []byte) {
	if len(x.known)+len(b) > maxTextField {
		b = truncate.Prefix(b, maxTextField-len(x.known))
		b = append(bytes.Clone(b), truncationNote...)
		x.cut = true
	}
	x.known = append(x.known, b...)
}

// hasUnsentText reports whether a part of the text is not in the journal yet.
func (x *blockText) hasUnsentText() bool { return x.sent < len(x.known) }

// takePiece returns the next piece of the text that is not in the journal yet, of at most limit bytes and whole runes,
// and the offset of the piece in the text. It marks the piece as journaled.
func (x *blockText) takePiece(limit int) (uint32, string) {
	piece := truncate.Prefix(x.known[x.sent:], limit)
	offset := uint32(x.sent) //nolint:gosec // at most maxTextField and the note
	x.sent += len(piece)
	return offset, string(piece)
}

// storeIn sets the field of the block that holds the text, such as its content or output.
func (x *blockText) storeIn(b *events.Block) {
	if len(x.known) == 0 {
		return
	}
	switch b.Kind {
	case events.KindToolUse:
		// Input that is not complete JSON is left out.
		if len(b.Input) == 0 && len(*x.typed) <= maxTextField && json.Valid(*x.typed) {
			b.Input = bytes.Clone(*x.typed)
		}
	case events.KindToolResult, events.KindSubagent:
		b.Output = string(x.known)
	default:
		b.Content = string(x.known)
	}
}

// incompleteRune returns the number of bytes of the incomplete rune at the end of b, 0 if there is none.
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

// applyBlockUpdates sets the fields of an open block that an update contains.
func applyBlockUpdates(b *events.Block, u events.BlockUpdates) {
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
	if u.Plan != nil {
		b.Plan = u.Plan
	}
	if u.Step != nil {
		b.Step = u.Step
	}
}

// encodeLine encodes the data of a journal line as JSON in valid UTF-8. If the result is too long for a line,
// encodeLine cuts long texts in data; cut reports whether it did.
func encodeLine(data any) (raw json.RawMessage, cut bool, err error) {
	for _, limit := range []int{maxTextField + len(truncationNote), maxTextField / 8} {
		small, wasCut := truncateFields(data, limit)
		raw, err := encodeJSON(small)
		if err != nil {
			return nil, false, err
		}
		cut = cut || wasCut
		if len(raw) <= runner.MaxLineLength-(16<<10) { // room for the line around it
			return raw, cut, nil
		}
		cut = true
	}
	return nil, true, errLineTooLong
}

// encodeJSON returns v as JSON without HTML escapes. Invalid UTF-8 becomes U+FFFD, also inside raw messages, which
// encoding/json does not check.
func encodeJSON(data any) (json.RawMessage, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(data); err != nil {
		return nil, err
	}
	return bytes.ToValidUTF8(bytes.TrimSuffix(buf.Bytes(), []byte("\n")), []byte("\uFFFD")), nil
}

// truncateFields returns data with the fields whose length the agent determines cut to limit bytes, and reports whether
// a field was longer than that or was not valid JSON.
func truncateFields(data any, limit int) (any, bool) {
	cut := false
	long := func(fields ...*string) {
		for _, f := range fields {
			if len(*f) > limit {
				*f, cut = truncate.Prefix(*f, limit-len(truncationNote))+truncationNote, true
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
	plan := func(p **events.Plan) {
		if *p == nil {
			return
		}
		out := **p
		long(&out.Title, &out.Explanation)
		if len(out.Items) > maxPlanItems {
			out.Items, cut = out.Items[:maxPlanItems], true
		}
		out.Items = slices.Clone(out.Items)
		short := func(f *string, limit int) {
			if len(*f) > limit {
				*f, cut = truncate.Text(*f, limit), true
			}
		}
		for i := range out.Items {
			item := &out.Items[i]
			short(&item.Content, maxPlanContent)
			short(&item.ItemID, maxPlanWord)
			short(&item.Priority, maxPlanWord)
		}
		*p = &out
	}
	step := func(s **events.Step) {
		if *s == nil {
			return
		}
		out := **s
		long(&out.Title, &out.Result, &out.ErrorMessage)
		*s = &out
	}
	block := func(b *events.Block) {
		b.Description = truncate.Text(b.Description, maxDescription)
		if len(b.Anchor) > maxAnchor {
			b.Anchor = "" // a part of it would be another position, or none
		}
		long(&b.Content, &b.Summary, &b.Output, &b.Message, &b.DisplayName, &b.Name, &b.ToolName, &b.ToolUseID)
		raw(&b.Input)
		plan(&b.Plan)
		step(&b.Step)
		if b.Skill != nil {
			skill := *b.Skill
			long(&skill.Name, &skill.Version, &skill.Path)
			b.Skill = &skill
		}
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
		plan(&d.Updates.Plan)
		step(&d.Updates.Step)
		data = d
	case events.Log:
		d.Message = Truncate(d.Message, maxLogMessage)
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

// cleanJSON returns a JSON value in a form that every JSON reader accepts: unpaired surrogates become U+FFFD. It
// returns false for a value that is not JSON.
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
	clean, err := encodeJSON(v)
	return clean, err == nil
}
