package model

import (
	"encoding/json"
	"fmt"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/shared"
)

// cutShortNote is appended to the text of an earlier answer that was cut short, when the conversation is sent to the
// model.
const cutShortNote = "\n[this answer was cut short before it was finished]"

// requestParams converts a Request to the format of the OpenAI API.
func requestParams(r Request) openai.ChatCompletionNewParams {
	p := openai.ChatCompletionNewParams{
		Model:         r.Model,
		StreamOptions: openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)},
	}
	if r.System != "" {
		p.Messages = append(p.Messages, openai.SystemMessage(r.System))
	}
	for _, m := range r.Messages {
		p.Messages = append(p.Messages, messageParam(m))
	}
	for _, t := range r.Tools {
		var schema map[string]any
		if err := json.Unmarshal(t.Schema, &schema); err != nil {
			panic(fmt.Sprintf("schema of tool %s: %v", t.Name, err)) // the schemas are constants, and a test checks them
		}
		p.Tools = append(p.Tools, openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{
			Name: t.Name, Description: openai.String(t.Description), Parameters: schema,
		}))
	}
	return p
}

// messageParam converts a Message to the format of the OpenAI API.
func messageParam(m Message) openai.ChatCompletionMessageParamUnion {
	switch m.Role {
	case RoleTool:
		return openai.ToolMessage(m.Text, m.CallID)
	case RoleAssistant:
		var a openai.ChatCompletionAssistantMessageParam
		if m.Partial {
			m.Text += cutShortNote
		}
		if m.Text != "" {
			a.Content.OfString = openai.String(m.Text)
		}
		for _, c := range m.Calls {
			a.ToolCalls = append(a.ToolCalls, openai.ChatCompletionMessageToolCallUnionParam{OfFunction: &openai.ChatCompletionMessageFunctionToolCallParam{
				ID: c.ID, Function: openai.ChatCompletionMessageFunctionToolCallFunctionParam{Name: c.Name, Arguments: string(c.Arguments)},
			}})
		}
		return openai.ChatCompletionMessageParamUnion{OfAssistant: &a}
	}
	if len(m.Images) == 0 {
		return openai.UserMessage(m.Text)
	}
	var parts []openai.ChatCompletionContentPartUnionParam
	if m.Text != "" {
		parts = append(parts, openai.TextContentPart(m.Text))
	}
	for _, u := range m.Images {
		parts = append(parts, openai.ImageContentPart(openai.ChatCompletionContentPartImageImageURLParam{URL: string(u)}))
	}
	return openai.UserMessage(parts)
}
