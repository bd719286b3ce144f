// Package modelbody checks the bodies of model requests. A model provider can fetch URLs, run tools and read data stored in the
// account, so a request could make the provider do what the allowlist does not allow the agent itself.
package modelbody

import (
	"bytes"
	"strings"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Protocol is the model provider's API to which a request belongs.
type Protocol int

// The protocols.
const (
	Anthropic Protocol = iota + 1 // Messages, and counting their tokens
	OpenAI                        // Responses, Chat Completions, Completions and Embeddings
)

// DeniedError is returned for a body that makes the provider do something that the allowlist does not allow.
type DeniedError struct {
	Feature string // of the allowlist entry that would allow it; "" if no entry can
	What    string // the part of the body, as a phrase
}

func (e *DeniedError) Error() string {
	if e.Feature == "" {
		return "the request makes the model's provider act by itself: " + e.What + ", which no allowlist entry allows"
	}
	return "the request makes the model's provider act by itself: " + e.What + "; the allowlist entry " + egress.ProviderEntry(e.Feature) + " allows it"
}

// Check checks the body of a request and returns the model that it names. allows reports whether the allowlist
// allows a feature. The error is a *DeniedError or an *UnreadableError.
func Check(p Protocol, body []byte, allows func(feature string) bool) (model string, err error) {
	s := scanner{body: body, allows: allows, keys: make([][]byte, 0, 64)}
	in := anthropicRequest
	if p == OpenAI {
		in = openAIRequest
	}
	err = s.readDocument(in)
	return s.model, err
}

// place is a position in a request, which determines the meaning of a value.
type place uint8

const (
	opaque           place = iota // JSON of the client that no provider acts on: schemas, arguments of tools
	unknown                       // in a field that this package does not know
	anthropicRequest              // the document itself
	anthropicBlock                // messages, and blocks of their content
	anthropicTool
	anthropicSource // of an image or a document
	openAIRequest
	openAIInput // the elements of input
	openAIItem  // messages, and parts of messages and items
	openAIAudio // an earlier answer's
	openAITool
	openAIEnvironment // of a shell tool
)

// field is the kind of check that applies to the value of a key in one kind of object.
type field struct {
	in    place    // of the value
	needs string   // the feature that the value needs, unless it is null, false or empty
	mark  seenKeys // set on the object, unless the value is null, false or empty
	check func(s *scanner, key []byte, v value) error
}

// seenKeys is the set of keys that an object has, as far as checks at its end depend on them.
type seenKeys uint8

const (
	hasID seenKeys = 1 << iota
	hasRole
	hasSchema
	hasEncrypted
	hasURL
	hasEnvironment
)

// object holds what is known about a JSON object of a request while it is read.
type object struct {
	typ   string
	typed bool // type is there, and not null
	marks seenKeys
}

// grammar describes how the objects at one place in a request are checked.
type grammar struct {
	fields map[string]field
	other  field // of keys that are not in fields
	urls   bool  // strings at keys that end in url need a feature, unless they are data URLs
	closed func(s *scanner, o *object) error
}

// grammars has the grammar of each place. The place opaque has none, because its values are not checked.
var grammars = map[place]*grammar{
	unknown: {urls: true, other: field{in: unknown}, fields: map[string]field{
		"schema": {}, "input_schema": {}, "metadata": {}, "parameters": {},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored}, "source": {in: anthropicSource},
	}},
	anthropicRequest: {urls: true, other: field{in: unknown}, fields: map[string]field{
		"model": {check: (*scanner).checkModel}, "messages": {in: anthropicBlock}, "system": {in: anthropicBlock}, "tools": {in: anthropicTool},
		"mcp_servers": {needs: "mcp"}, "container": {needs: egress.FeatureUseStored}, "metadata": {}, "output_format": {},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	}},
	anthropicBlock: {other: field{in: anthropicBlock}, closed: (*scanner).checkBlock, fields: map[string]field{
		"input": {}, "citations": {}, "source": {in: anthropicSource}, "file_id": {needs: egress.FeatureReadFile}, "url": {mark: hasURL},
	}},
	anthropicTool: {closed: (*scanner).anthropicTool, fields: map[string]field{}},
	anthropicSource: {other: field{in: anthropicBlock}, closed: (*scanner).checkSource, fields: map[string]field{
		"url": {mark: hasURL}, "file_id": {needs: egress.FeatureReadFile},
	}},
	openAIRequest: {urls: true, other: field{in: unknown}, fields: map[string]field{
		"model": {check: (*scanner).checkModel}, "input": {in: openAIInput}, "messages": {in: openAIItem}, "prediction": {in: openAIItem}, "tools": {in: openAITool},
		"functions": {}, "response_format": {}, "text": {}, "metadata": {}, "audio": {}, "logit_bias": {},
		"previous_response_id": {needs: egress.FeatureUseStored}, "conversation": {needs: egress.FeatureUseStored}, "prompt": {check: (*scanner).checkPrompt},
		"background": {check: (*scanner).checkBackground}, "web_search_options": {check: (*scanner).checkSearch}, "search_parameters": {check: (*scanner).checkSearch}, "plugins": {check: (*scanner).checkSearch},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	}},
	openAIInput:       {urls: true, other: field{in: openAIItem}, closed: (*scanner).checkInput, fields: openAIFields},
	openAIItem:        {urls: true, other: field{in: openAIItem}, closed: (*scanner).checkItem, fields: openAIFields},
	openAIAudio:       {fields: map[string]field{"id": {needs: egress.FeatureUseStored}}},
	openAITool:        {closed: (*scanner).openAITool, fields: openAIToolFields},
	openAIEnvironment: {closed: (*scanner).checkEnvironment, fields: map[string]field{}},
}

var openAIFields = map[string]field{
	"arguments": {}, "action": {}, "annotations": {}, "results": {}, "outputs": {}, "function": {}, "logprobs": {}, "input": {}, "input_schema": {},
	"id": {mark: hasID}, "role": {mark: hasRole}, "encrypted_content": {mark: hasEncrypted}, "tools": {in: openAITool}, "audio": {in: openAIAudio},
	"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	"file_data": {check: (*scanner).fileData},
}

var openAIToolFields = map[string]field{
	"tools": {in: openAITool}, "function": {mark: hasSchema}, "input_schema": {mark: hasSchema}, "environment": {in: openAIEnvironment, mark: hasEnvironment},
	"server_url": {needs: "mcp"}, "connector_id": {needs: "mcp"}, "vector_store_ids": {needs: "file_search"}, "container": {needs: "code_interpreter"},
}

// checkMember parses and checks the value of a key of the object o. in is the place of that object.
func (s *scanner) checkMember(in place, key []byte, o *object) error {
	g := grammars[in]
	if g == nil {
		_, err := s.readValue(opaque)
		return err
	}
	key = lower(key)
	f, known := g.fields[string(key)]
	if !known {
		f = g.other
	}
	v, err := s.readValue(f.in)
	if err != nil {
		return err
	}
	if string(key) == "type" {
		o.typ, o.typed = v.string(), v.kind != 'n'
	}
	if v.present {
		o.marks |= f.mark
		if f.needs != "" {
			if err := s.requireFeature(f.needs, string(key)); err != nil {
				return err
			}
		}
	}
	if f.check != nil {
		return f.check(s, key, v)
	}
	if g.urls && !known {
		return s.checkURL(key, v)
	}
	return nil
}

// lower returns a key in lower case, because some servers ignore the case of keys.
func lower(key []byte) []byte {
	for _, c := range key {
		if c >= 'A' && c <= 'Z' {
			return bytes.ToLower(key)
		}
	}
	return key
}

// checkEnd checks an object at the place in, after all of its keys were read.
func (s *scanner) checkEnd(in place, o *object) error {
	if g := grammars[in]; g != nil && g.closed != nil {
		return g.closed(s, o)
	}
	return nil
}

// requireFeature returns a *DeniedError unless the allowlist allows a feature.
func (s *scanner) requireFeature(feature, what string) error {
	if feature != "" && s.allows(feature) {
		return nil
	}
	return &DeniedError{Feature: feature, What: what}
}

// checkURL checks the value of a key that may have a URL for the provider to fetch. Data URLs are not fetched.
func (s *scanner) checkURL(key []byte, v value) error {
	switch {
	case bytes.HasSuffix(key, []byte("urls")) && v.present:
	case !bytes.HasSuffix(key, []byte("url")) && string(key) != "uri" || v.kind != '"' || !v.present:
		return nil
	case hasPrefixFold(v, "data:"):
		return nil
	}
	return s.requireFeature(egress.FeatureFetchURL, "a URL at "+printable(string(key)))
}

// hasPrefixFold reports whether a JSON string begins with prefix, which must be in lower case, ignoring the case of the
// string.
func hasPrefixFold(v value, prefix string) bool {
	text := v.text[:min(len(v.text), 8*len(prefix))]
	if v.escaped {
		text = []byte(v.string())
	}
	return len(text) >= len(prefix) && strings.EqualFold(string(text[:len(prefix)]), prefix)
}

func printable(s string) string { return egress.QuotePrefix(s) }

// maxModel is the maximum length in bytes of the name of a model; the rest is cut.
const maxModel = 200

func (s *scanner) checkModel(_ []byte, v value) error {
	name := v.string()
	s.model = strings.ToValidUTF8(truncate.Prefix(name, maxModel), "")
	// Some models search the web without a tool.
	if strings.Contains(name, "-search-preview") || strings.Contains(name, "-search-api") || strings.HasSuffix(name, ":online") {
		return s.requireFeature("web_search", "model "+printable(name)+", which searches the web")
	}
	return nil
}

func (s *scanner) checkPrompt(_ []byte, v value) error {
	if v.kind != '{' { // the prompt of Completions is a string
		return nil
	}
	return s.requireFeature(egress.FeatureUseStored, "a stored prompt")
}

func (s *scanner) checkBackground(_ []byte, v value) error {
	if !v.present {
		return nil
	}
	return s.requireFeature("", "a response in the background, whose usage cannot be metered")
}

func (s *scanner) checkSearch(key []byte, v value) error {
	if v.kind == 'n' || v.kind == 'f' { // an empty object enables the search
		return nil
	}
	return s.requireFeature("web_search", string(key))
}

func (s *scanner) fileData(_ []byte, v value) error {
	if !hasPrefixFold(v, "http") {
		return nil
	}
	return s.requireFeature(egress.FeatureFetchURL, "a URL at file_data")
}

// checkBlock checks a message or a content block of Anthropic's API.
func (s *scanner) checkBlock(o *object) error {
	switch {
	case o.typ == "container_upload":
		return s.requireFeature(egress.FeatureReadFile, "a file for a container")
	case o.marks&hasURL != 0 && o.typ != "web_search_result" && o.typ != "web_fetch_result":
		return s.requireFeature(egress.FeatureFetchURL, "a URL in a block of type "+printable(o.typ))
	}
	return nil
}

func (s *scanner) checkSource(o *object) error {
	switch o.typ {
	case "base64", "text", "content":
		if o.marks&hasURL == 0 {
			return nil
		}
		fallthrough
	case "url":
		return s.requireFeature(egress.FeatureFetchURL, "a source that is a URL")
	case "file":
		return s.requireFeature(egress.FeatureReadFile, "a source that is a file of the account")
	}
	return s.requireFeature("", "a source of type "+printable(o.typ)+", which is not known")
}

// anthropicTools are the types of Anthropic's tools that are allowed: the client runs them, or they use only the request's content.
var anthropicTools = map[string]bool{
	"custom": true, "bash": true, "text_editor": true, "computer": true, "memory": true, "tool_search_tool_regex": true, "tool_search_tool_bm25": true,
}

func (s *scanner) anthropicTool(o *object) error {
	name := withoutDate(o.typ)
	switch {
	case !o.typed || anthropicTools[name]:
		return nil
	case name == "mcp_toolset":
		name = "mcp"
	}
	return s.serverTool(name, o)
}

// openAITools are the tools that the client runs, or that use nothing but the request.
var openAITools = map[string]bool{"function": true, "custom": true, "namespace": true, "local_shell": true, "apply_patch": true, "tool_search": true}

func (s *scanner) openAITool(o *object) error {
	name := withoutDate(o.typ)
	switch {
	case openAITools[name] || !o.typed && o.marks&hasSchema != 0:
		return nil
	case name == "shell" && o.marks&hasEnvironment != 0: // its environment is checked instead
		return nil
	case name == "web_search_preview":
		name = "web_search"
	case name == "computer_use_preview" || name == "computer":
		name = "computer_use"
	}
	return s.serverTool(name, o)
}

func (s *scanner) serverTool(name string, o *object) error {
	if name == egress.FeatureFetchURL || name == egress.FeatureReadFile || name == egress.FeatureUseStored || !egress.IsProviderFeature(name) {
		return s.requireFeature("", "a tool of type "+printable(o.typ)+", which is not known")
	}
	return s.requireFeature(name, "the tool "+printable(o.typ))
}

func (s *scanner) checkEnvironment(o *object) error {
	if o.typ == "local" {
		return nil
	}
	return s.requireFeature("shell", "a shell in a container of the provider")
}

// checkInput checks an element of Responses' input.
func (s *scanner) checkInput(o *object) error {
	if !o.typed && o.marks&hasRole == 0 && o.marks&hasID != 0 {
		return s.requireFeature(egress.FeatureUseStored, "an item by its id")
	}
	return s.checkItem(o)
}

func (s *scanner) checkItem(o *object) error {
	switch {
	case o.typ == "item_reference":
		return s.requireFeature(egress.FeatureUseStored, "an item by its id")
	case o.typ == "reasoning" && o.marks&(hasID|hasEncrypted) == hasID:
		return s.requireFeature(egress.FeatureUseStored, "reasoning by its id")
	case o.typ == "image_generation_call" && o.marks&hasID != 0:
		return s.requireFeature("image_generation", "an image by its id")
	}
	return nil
}

// withoutDate returns the type of a tool without the date of its version: web_search_20250305, web_search_2025_08_26.
func withoutDate(typ string) string {
	for _, form := range []string{"_dddddddd", "_dddd_dd_dd"} {
		if n := len(typ) - len(form); n > 0 && matches(typ[n:], form) {
			return typ[:n]
		}
	}
	return typ
}

// matches reports whether a text has the form of form, in which a d stands for any digit.
func matches(text, form string) bool {
	for i := range len(form) {
		if c := text[i]; form[i] == 'd' && (c < '0' || c > '9') || form[i] != 'd' && c != form[i] {
			return false
		}
	}
	return true
}
