// Command gen writes docs/events.md from events.EventTypes and the comments of its Go types.
package main

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/gen/notes"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: gen SOURCE_DIR OUTPUT")
		os.Exit(2)
	}
	text, err := renderPage(os.Args[1])
	if err == nil {
		err = os.WriteFile(os.Args[2], text, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

// renderPage returns the content of docs/events.md. dir is the folder of the Go types whose comments the page contains.
func renderPage(dir string) ([]byte, error) {
	comments, err := notes.ReadFieldComments(dir)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	b.WriteString(pagePreface)
	for _, part := range []struct {
		aspect events.Aspect
		title  string
	}{
		{events.Life, "On `life`: what the session service decides"},
		{events.Run, "On `run`: what happens to executions"},
		{events.Key, "In the catalogue: `key`"},
		{events.Agent, "In the catalogue: `agent`"},
		{events.Instance, "In the catalogue: `instance`"},
		{events.Environment, "In the catalogue: `environment`"},
		{events.Skill, "In the catalogue: `skill`"},
		{events.TenantBudget, "Tenants: `budget`"},
		{events.LimitsAspect, "Tenants: `limits`"},
	} {
		fmt.Fprintf(&b, "\n## %s\n", part.title)
		for _, e := range events.EventTypes() {
			if e.Aspect == part.aspect {
				fmt.Fprintf(&b, "\n### `%s`\n%s\n", e.Type, e.Doc)
				writeFields(&b, reflect.TypeOf(e.New()), comments)
			}
		}
	}
	b.WriteString("\n## Shapes used above\n")
	for _, v := range []any{events.Block{}, events.BlockUpdates{}, events.Part{}, events.Plan{}, events.PlanItem{}, events.Step{}, events.LoadedSkill{}, events.TodoItem{}, events.Options{}, events.Usage{}, events.Reference{}, events.ModelSettings{}, events.AgentSpec{}, events.ToolChoice{},
		events.SubagentSpec{}, events.CommandSpec{}, events.MCPServer{}, events.Declaration{}, events.Dependencies{}, events.FileSpec{}, events.Limits{}, events.Retries{}, events.Loops{}, events.Permissions{}, events.PermissionRule{}, events.ExecutionPermissions{}, events.ApprovalPreview{}, events.CutField{}, events.Question{}, events.QuestionOption{}, events.InstanceSpec{},
		events.EnvironmentSpec{}, events.Variable{}, events.Provenance{}, events.SkillUsed{}, events.AllowedHost{}, events.TenantLimits{}, events.KeyRights{}} {
		t := reflect.TypeOf(v)
		fmt.Fprintf(&b, "\n### `%s`\n", t.Name())
		writeFields(&b, t, comments)
	}
	return b.Bytes(), nil
}

// pagePreface is the beginning of docs/events.md.
const pagePreface = `# Events
Generated from pkg/events; do not edit.

An event is the same JSON on REST, SSE, WebSocket, gRPC and ` + "`--json`" + `:

` + "```json" + `
{"seq":12,"position":"0-48211","id":"evt_…","type":"block_start","time":"RFC 3339","sessionId":"ses_…",
 "executionId":"exe_…","conversationId":"main","source":"runner|server","data":{…},"metadata":{"session":…,"message":…}}
` + "```" + `

` + "`seq`" + ` numbers a session's events 1, 2, 3, … without a gap and is the cursor of every interface. Streams also send
` + "`text_delta`" + ` with the seq of the last stored event and ` + "`data: {blockId, offset, delta}`" + `: a piece of the text of an open block, at an
offset in UTF-8 bytes. A ` + "`block_complete`" + ` always contains the complete text, so a client that misses deltas loses nothing. A reader must ignore
events of unknown types, and must not discard them from what it stores. Milliseconds, counts and offsets are unsigned 32-bit numbers; times are RFC 3339 in UTC.

` + "`metadata`" + ` holds the application's metadata, unchanged: that of the session, and that of the message which the event's execution
answers. Each part is absent if there is none. An event has the session's metadata that was valid when the event was appended, so a
later change affects later events only, and a replay is always the same. The log and Postgres store it once; the gateway adds it.
Deltas have none. ` + "`?metadata=0`" + ` (REST, SSE), ` + "`\"metadata\":false`" + ` in a join (WebSocket) or in the request (gRPC) leave it out.
`

// writeFields writes the fields of a struct as a table.
func writeFields(b *bytes.Buffer, t reflect.Type, notes map[string]string) {
	if t.NumField() == 0 {
		b.WriteString("\nIts data is empty.\n")
		return
	}
	b.WriteString("\n| field | type | |\n| --- | --- | --- |\n")
	for i := range t.NumField() {
		f := t.Field(i)
		name, rest, _ := strings.Cut(f.Tag.Get("json"), ",")
		kind := typeName(f.Type)
		if strings.Contains(rest, "omit") {
			kind += ", optional"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", name, kind, notes[t.Name()+"."+f.Name])
	}
}

// typeName returns the name of a field's type in docs/events.md.
func typeName(t reflect.Type) string {
	switch {
	case t.Kind() == reflect.Pointer:
		return typeName(t.Elem())
	case t.String() == "json.RawMessage":
		return "any JSON"
	case t.String() == "time.Time":
		return "time"
	case t.Kind() == reflect.Slice:
		return "list of " + typeName(t.Elem())
	case t.Kind() == reflect.Map:
		return "object of " + typeName(t.Elem())
	case t.Kind() == reflect.Struct:
		return "`" + t.Name() + "`"
	case t.Kind() == reflect.String:
		return "string"
	case t.Kind() == reflect.Bool:
		return "boolean"
	case t.Kind() == reflect.Float64:
		return "number"
	}
	return "integer"
}
