package events

import (
	"bytes"
	"encoding/json"
	"math"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// The payloads that most events have are encoded and decoded by this code, without reflection. It writes what
// encoding/json writes without HTML escapes, and accepts nothing that encoding/json would decode to other values; the
// tests compare them. encoding/json encodes and decodes everything else.

// AppendJSON appends the JSON of the block to dst.
func (b Block) AppendJSON(dst []byte) ([]byte, error) {
	if out, ok := b.appendJSON(dst); ok {
		return out, nil
	}
	return appendMarshalJSON(dst, b)
}

// appendPayloadJSON appends the JSON of a payload to b, in the form that encoding/json writes without HTML escapes.
func appendPayloadJSON(b []byte, p Payload) ([]byte, error) {
	if out, ok := appendCompactPayload(b, p); ok {
		return out, nil
	}
	return appendMarshalJSON(b, p)
}

// appendMarshalJSON appends the JSON that encoding/json writes for v to b.
func appendMarshalJSON(b []byte, v any) ([]byte, error) {
	data, err := marshalJSON(v)
	if err != nil {
		return nil, err
	}
	return append(b, data...), nil
}

// appendCompactPayload appends the JSON of a payload of one of the frequent types. If ok is false, encoding/json must
// encode the payload.
func appendCompactPayload(b []byte, p Payload) (out []byte, ok bool) {
	switch d := p.(type) {
	case BlockStart:
		if b, ok = d.Block.appendJSON(append(b, `{"block":`...)); ok && d.TextAfter != 0 {
			b = compact.AppendUint(b, `,"textAfter":`, d.TextAfter)
		}
	case BlockComplete:
		b, ok = d.Block.appendJSON(append(b, `{"block":`...))
	case Log:
		b = compact.AppendString(append(b, `{"level":`...), d.Level)
		b = compact.AppendString(append(b, `,"stream":`...), d.Stream)
		b = compact.AppendString(append(b, `,"message":`...), d.Message)
		ok = true
	case MetadataUpdate:
		b = appendOptional(d.Usage.appendJSON(append(b, `{"usage":`...)), `,"model":`, d.Model)
		ok = d.CostUSD == 0
	case MessageAccepted:
		b = compact.AppendString(append(b, `{"blockId":`...), d.BlockID)
		b = appendOptional(b, `,"content":`, d.Content)
		ok = len(d.Parts)+len(d.Metadata)+len(d.Environment)+len(d.Permissions.Rules) == 0 && !d.Permissions.Unattended && d.RecoveredFrom == "" && !d.Continue
	case ExecutionClaimed:
		b = compact.AppendUint(b, `{"epoch":`, d.Epoch)
		b = compact.AppendString(append(b, `,"executor":`...), d.Executor)
		b = compact.AppendUint(b, `,"turn":`, uint64(d.Turn))
		ok = true
	case ExecutionStarted:
		b = compact.AppendUint(b, `{"attempt":`, uint64(d.Attempt))
		b = appendBool(append(b, `,"warm":`...), d.Warm)
		b = compact.AppendUint(b, `,"pid":`, uint64(d.PID))
		b = compact.AppendString(append(b, `,"policy":`...), d.Policy)
		ok = true
	case ExecutionCompleted:
		b = compact.AppendUint(b, `{"durationMs":`, uint64(d.DurationMs))
		b = d.Usage.appendJSON(append(b, `,"usage":`...))
		b = appendOptional(b, `,"result":`, d.Result)
		ok = d.CostUSD == 0
	}
	return append(b, '}'), ok
}

// appendJSON appends the JSON of the usage to b.
func (u Usage) appendJSON(b []byte) []byte {
	b = compact.AppendUint(b, `{"inputTokens":`, uint64(u.InputTokens))
	b = compact.AppendUint(b, `,"outputTokens":`, uint64(u.OutputTokens))
	if u.CacheReadTokens != 0 {
		b = compact.AppendUint(b, `,"cacheReadTokens":`, uint64(u.CacheReadTokens))
	}
	if u.CacheWriteTokens != 0 {
		b = compact.AppendUint(b, `,"cacheWriteTokens":`, uint64(u.CacheWriteTokens))
	}
	return append(b, '}')
}

// appendJSON appends the JSON of the block. If ok is false, encoding/json must encode it.
func (b Block) appendJSON(dst []byte) (out []byte, ok bool) {
	if len(b.Parts)+len(b.Todos) > 0 || b.Plan != nil || b.Step != nil || b.Skill != nil || len(b.Input) > 0 && !isCompact(b.Input) {
		return nil, false
	}
	dst = compact.AppendString(append(dst, `{"id":`...), b.ID)
	dst = compact.AppendString(append(dst, `,"kind":`...), string(b.Kind))
	dst = compact.AppendString(append(dst, `,"status":`...), string(b.Status))
	dst, err := compact.AppendTime(append(dst, `,"timestamp":`...), b.Time)
	if err != nil {
		return nil, false
	}
	dst = appendOptional(dst, `,"executionId":`, b.ExecutionID)
	dst = appendOptional(dst, `,"conversationId":`, b.ConversationID)
	dst = appendOptional(dst, `,"anchor":`, b.Anchor)
	dst = appendOptional(dst, `,"content":`, b.Content)
	dst = appendOptional(dst, `,"model":`, b.Model)
	dst = appendOptional(dst, `,"summary":`, b.Summary)
	dst = appendOptional(dst, `,"toolName":`, b.ToolName)
	dst = appendOptional(dst, `,"toolUseId":`, b.ToolUseID)
	if len(b.Input) > 0 {
		dst = append(append(dst, `,"input":`...), b.Input...)
	}
	dst = appendOptional(dst, `,"displayName":`, b.DisplayName)
	dst = appendOptional(dst, `,"description":`, b.Description)
	dst = appendOptional(dst, `,"output":`, b.Output)
	if b.IsError {
		dst = append(dst, `,"isError":true`...)
	}
	if b.DurationMs != 0 {
		dst = compact.AppendUint(dst, `,"durationMs":`, uint64(b.DurationMs))
	}
	dst = appendOptional(dst, `,"subagentId":`, b.SubagentID)
	dst = appendOptional(dst, `,"name":`, b.Name)
	dst = appendOptional(dst, `,"subtype":`, b.Subtype)
	dst = appendOptional(dst, `,"code":`, b.Code)
	dst = appendOptional(dst, `,"message":`, b.Message)
	return append(dst, '}'), true
}

// isCompact reports whether raw is JSON that encoding/json would not change.
func isCompact(raw json.RawMessage) bool {
	r := compact.NewReader(raw)
	r.Raw()
	return r.AtEnd()
}

// appendOptional appends a JSON member with a string value, unless the value is empty.
func appendOptional(b []byte, key, value string) []byte {
	if value == "" {
		return b
	}
	return compact.AppendString(append(b, key...), value)
}

// appendBool appends true or false to b.
func appendBool(b []byte, v bool) []byte {
	if v {
		return append(b, "true"...)
	}
	return append(b, "false"...)
}

// decodeCompactPayload decodes a payload in the form that appendCompactPayload writes. If ok is false, encoding/json
// must decode the data.
func decodeCompactPayload(t Type, data []byte) (p Payload, ok bool) {
	r := compact.NewReader(data)
	switch t {
	case "block_start":
		r.Expect(`{"block":`)
		d := BlockStart{Block: readBlock(&r)}
		if r.SkipOptional(`,"textAfter":`) {
			d.TextAfter = r.Uint(math.MaxUint64)
		}
		p = d
	case "block_complete":
		r.Expect(`{"block":`)
		p = BlockComplete{readBlock(&r)}
	case "log":
		var d Log
		r.Expect(`{"level":`)
		d.Level = r.String()
		r.Expect(`,"stream":`)
		d.Stream = r.String()
		r.Expect(`,"message":`)
		d.Message = r.String()
		p = d
	case "metadata_update":
		var d MetadataUpdate
		r.Expect(`{"usage":`)
		d.Usage = readUsage(&r)
		d.Model = r.OptionalString(`,"model":`)
		p = d
	case "message_accepted":
		var d MessageAccepted
		r.Expect(`{"blockId":`)
		d.BlockID = r.String()
		d.Content = r.OptionalString(`,"content":`)
		p = d
	case "execution_claimed":
		var d ExecutionClaimed
		r.Expect(`{"epoch":`)
		d.Epoch = r.Uint(math.MaxUint64)
		r.Expect(`,"executor":`)
		d.Executor = r.String()
		r.Expect(`,"turn":`)
		d.Turn = readUint32(&r)
		p = d
	case "execution_started":
		var d ExecutionStarted
		r.Expect(`{"attempt":`)
		d.Attempt = readUint32(&r)
		r.Expect(`,"warm":`)
		if d.Warm = r.SkipOptional("true"); !d.Warm {
			r.Expect("false")
		}
		r.Expect(`,"pid":`)
		d.PID = readUint32(&r)
		r.Expect(`,"policy":`)
		d.Policy = r.String()
		p = d
	case "execution_completed":
		var d ExecutionCompleted
		r.Expect(`{"durationMs":`)
		d.DurationMs = readUint32(&r)
		r.Expect(`,"usage":`)
		d.Usage = readUsage(&r)
		d.Result = r.OptionalString(`,"result":`)
		p = d
	default:
		return nil, false
	}
	r.Expect(`}`)
	return p, r.AtEnd()
}

// readUint32 reads a JSON number that fits into 32 bits.
func readUint32(r *compact.Reader) uint32 { return uint32(r.Uint(math.MaxUint32)) } //nolint:gosec // limited

// readUsage reads the form that Usage.appendJSON writes.
func readUsage(r *compact.Reader) (u Usage) {
	r.Expect(`{"inputTokens":`)
	u.InputTokens = readUint32(r)
	r.Expect(`,"outputTokens":`)
	u.OutputTokens = readUint32(r)
	if r.SkipOptional(`,"cacheReadTokens":`) {
		u.CacheReadTokens = readUint32(r)
	}
	if r.SkipOptional(`,"cacheWriteTokens":`) {
		u.CacheWriteTokens = readUint32(r)
	}
	r.Expect(`}`)
	return u
}

// readBlock reads the form that Block.appendJSON writes.
func readBlock(r *compact.Reader) (b Block) {
	r.Expect(`{"id":`)
	b.ID = r.String()
	r.Expect(`,"kind":`)
	b.Kind = BlockKind(r.String())
	r.Expect(`,"status":`)
	b.Status = BlockStatus(r.String())
	r.Expect(`,"timestamp":`)
	b.Time = r.Time()
	b.ExecutionID = r.OptionalString(`,"executionId":`)
	b.ConversationID = r.OptionalString(`,"conversationId":`)
	b.Anchor = r.OptionalString(`,"anchor":`)
	b.Content = r.OptionalString(`,"content":`)
	b.Model = r.OptionalString(`,"model":`)
	b.Summary = r.OptionalString(`,"summary":`)
	b.ToolName = r.OptionalString(`,"toolName":`)
	b.ToolUseID = r.OptionalString(`,"toolUseId":`)
	if r.SkipOptional(`,"input":`) {
		b.Input = bytes.Clone(r.Raw()) // like that of encoding/json, it does not share memory with the data
	}
	b.DisplayName = r.OptionalString(`,"displayName":`)
	b.Description = r.OptionalString(`,"description":`)
	b.Output = r.OptionalString(`,"output":`)
	b.IsError = r.SkipOptional(`,"isError":true`)
	if r.SkipOptional(`,"durationMs":`) {
		b.DurationMs = readUint32(r)
	}
	b.SubagentID = r.OptionalString(`,"subagentId":`)
	b.Name = r.OptionalString(`,"name":`)
	b.Subtype = r.OptionalString(`,"subtype":`)
	b.Code = r.OptionalString(`,"code":`)
	b.Message = r.OptionalString(`,"message":`)
	r.Expect(`}`)
	return b
}
