// Package modelbody checks the bodies of model requests. A model provider can fetch URLs, run tools and read data stored in the
// account, so a request could make the provider do what the allowlist does not allow the agent itself.
package modelbody

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Protocol is the model provider's API to which a request belongs.
type Protocol int

// The protocols.
const (
	ProtocolAnthropic Protocol = iota + 1 // Messages, and counting their tokens
	ProtocolOpenAI                        // Responses, Chat Completions, Completions and Embeddings
)

// DeniedError is returned for the body of a model request that makes the model provider use a feature that the allowlist does not allow.
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

// Check checks the JSON body of a model request and returns the model that it names. allows reports whether the sandbox's allowlist allows
// a feature of the provider. The error is a *DeniedError or an *UnreadableError.
func Check(p Protocol, body []byte, allows func(feature string) bool) (model string, err error) {
	s := scanner{body: body, allows: allows, seed: maphash.MakeSeed(), keys: make([]uint64, 0, 64)}
	in := anthropicRequest
	if p == ProtocolOpenAI {
		in = openAIRequest
	}
	err = s.readDocument(in)
	return s.model, err
}

// location is the kind of place in a model request at which a JSON value is, such as a content block or a tool. It determines how the
// value is checked.
type location uint8

const (
	uncheckedLocation location = iota // JSON of the client that no provider acts on: schemas, arguments of tools
	unknownLocation                   // in a field that this package does not know
	anthropicRequest                  // the document itself
	anthropicBlock                    // messages, and blocks of their content
	anthropicTool
	anthropicSource // of an image or a document
	openAIRequest
	openAIInput // the elements of input
	openAIItem  // messages, and parts of messages and items
	openAIAudio // an earlier answer's
	openAITool
	openAIEnvironment // of a shell tool
)

// fieldRule states how the value of a key is checked in the objects of one location.
type fieldRule struct {
	in    location // of the value
	needs string   // the feature that the value needs, unless it is null, false or empty
	mark  seenKeys // set on the object, unless the value is null, false or empty
	check func(s *scanner, key []byte, v scannedValue) error
}

// seenKeys is the set of keys that an object has, among those that the check at the object's end needs.
type seenKeys uint8

const (
	hasID seenKeys = 1 << iota
	hasRole
	hasSchema
	hasEncrypted
	hasURL
	hasEnvironment
)

// objectState holds what the scanner knows about a JSON object while it reads the object.
type objectState struct {
	raw   []byte // the key that is being read, without escapes
	key   []byte // the same, folded
	typ   []byte
	typed bool // type is there, and not null
	marks seenKeys
}

// grammar states how the objects at one location of a request are checked.
type grammar struct {
	fields map[string]fieldRule
	other  fieldRule // of keys that are not in fields
	urls   bool      // strings at keys that end in url need a feature, unless they are data URLs
	exact  bool      // a key that differs from a known one only by foldKey is refused
	closed func(s *scanner, o *objectState) error
}

// grammars has the grammar of each location. uncheckedLocation has none.
var grammars = [openAIEnvironment + 1]*grammar{
	unknownLocation: {urls: true, other: fieldRule{in: unknownLocation}, fields: map[string]fieldRule{
		"schema": {}, "input_schema": {}, "metadata": {}, "parameters": {},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored}, "source": {in: anthropicSource},
	}},
	anthropicRequest: {exact: true, urls: true, other: fieldRule{in: unknownLocation}, fields: map[string]fieldRule{
		"model": {check: (*scanner).checkModel}, "messages": {in: anthropicBlock}, "system": {in: anthropicBlock}, "tools": {in: anthropicTool},
		"mcp_servers": {needs: "mcp"}, "container": {needs: egress.FeatureUseStored}, "metadata": {}, "output_format": {},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	}},
	anthropicBlock: {exact: true, other: fieldRule{in: anthropicBlock}, closed: (*scanner).checkAnthropicBlock, fields: map[string]fieldRule{
		"input": {}, "citations": {}, "source": {in: anthropicSource}, "file_id": {needs: egress.FeatureReadFile}, "url": {mark: hasURL},
	}},
	anthropicTool: {exact: true, closed: (*scanner).checkAnthropicTool, fields: map[string]fieldRule{}},
	anthropicSource: {exact: true, other: fieldRule{in: anthropicBlock}, closed: (*scanner).checkAnthropicSource, fields: map[string]fieldRule{
		"url": {mark: hasURL}, "file_id": {needs: egress.FeatureReadFile},
	}},
	openAIRequest: {exact: true, urls: true, other: fieldRule{in: unknownLocation}, fields: map[string]fieldRule{
		"model": {check: (*scanner).checkModel}, "input": {in: openAIInput}, "messages": {in: openAIItem}, "prediction": {in: openAIItem}, "tools": {in: openAITool},
		"functions": {}, "response_format": {}, "text": {}, "metadata": {}, "audio": {}, "logit_bias": {},
		"previous_response_id": {needs: egress.FeatureUseStored}, "conversation": {needs: egress.FeatureUseStored}, "prompt": {check: (*scanner).checkPrompt},
		"background": {check: (*scanner).checkBackground}, "web_search_options": {check: (*scanner).checkWebSearch}, "search_parameters": {check: (*scanner).checkWebSearch}, "plugins": {check: (*scanner).checkWebSearch},
		"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	}},
	openAIInput:       {exact: true, urls: true, other: fieldRule{in: openAIItem}, closed: (*scanner).checkOpenAIInput, fields: openAIFieldRules},
	openAIItem:        {exact: true, urls: true, other: fieldRule{in: openAIItem}, closed: (*scanner).checkOpenAIItem, fields: openAIFieldRules},
	openAIAudio:       {exact: true, fields: map[string]fieldRule{"id": {needs: egress.FeatureUseStored}}},
	openAITool:        {exact: true, closed: (*scanner).checkOpenAITool, fields: openAIToolFieldRules},
	openAIEnvironment: {exact: true, closed: (*scanner).checkOpenAIEnvironment, fields: map[string]fieldRule{}},
}

var openAIFieldRules = map[string]fieldRule{
	"arguments": {}, "action": {}, "annotations": {}, "results": {}, "outputs": {}, "function": {}, "logprobs": {}, "input": {}, "input_schema": {},
	"id": {mark: hasID}, "role": {mark: hasRole}, "encrypted_content": {mark: hasEncrypted}, "tools": {in: openAITool}, "audio": {in: openAIAudio},
	"file_id": {needs: egress.FeatureReadFile}, "file_ids": {needs: egress.FeatureReadFile}, "container_id": {needs: egress.FeatureUseStored},
	"file_data": {check: (*scanner).checkFileData},
}

var openAIToolFieldRules = map[string]fieldRule{
	"tools": {in: openAITool}, "function": {mark: hasSchema}, "input_schema": {mark: hasSchema}, "environment": {in: openAIEnvironment, mark: hasEnvironment},
	"server_url": {needs: "mcp"}, "connector_id": {needs: "mcp"}, "vector_store_ids": {needs: "file_search"}, "container": {needs: "code_interpreter"},
}

// checkMember reads and checks the value of the key of the object o that was read last. in is the location of o.
func (s *scanner) checkMember(in location, o *objectState) error {
	g := grammars[in]
	if g == nil {
		_, err := s.readValue(uncheckedLocation)
		return err
	}
	f, known := g.fields[string(o.key)]
	if !known {
		f = g.other
	}
	v, err := s.readValue(f.in)
	if err != nil {
		return err
	}
	if string(o.key) == "type" {
		text, _ := s.prefix(v) // no known type is longer
		o.typ, o.typed = append(o.typ[:0], text...), v.kind != 'n'
	}
	if v.present {
		o.marks |= f.mark
		if f.needs != "" {
			if err := s.requireFeature(f.needs, string(o.key)); err != nil {
				return err
			}
		}
	}
	if f.check != nil {
		return f.check(s, o.key, v)
	}
	if g.urls && !known {
		return s.checkURL(o.key, v)
	}
	return nil
}

// checkObjectEnd checks an object at the location in, after the scanner has read all of its keys.
func (s *scanner) checkObjectEnd(in location, o *objectState) error {
	if g := grammars[in]; g != nil && g.closed != nil {
		return g.closed(s, o)
	}
	return nil
}

// requireFeature returns a *DeniedError unless the allowlist allows a feature of the model provider. what names the use of the feature in
// the error.
func (s *scanner) requireFeature(feature, what string) error {
	if feature != "" && s.allows(feature) {
		return nil
	}
	return &DeniedError{Feature: feature, What: what}
}

// checkURL returns a *DeniedError if the value of a key is a URL that the provider would fetch and the allowlist does not allow that. The
// provider does not fetch data URLs.
func (s *scanner) checkURL(key []byte, v scannedValue) error {
	switch {
	case bytes.HasSuffix(key, []byte("urls")) && v.present:
	case !bytes.HasSuffix(key, []byte("url")) && string(key) != "uri" || v.kind != '"' || !v.present:
		return nil
	case s.hasPrefixFold(v, "data:"):
		return nil
	}
	return s.requireFeature(egress.FeatureFetchURL, "a URL at "+printableText(string(key)))
}

// hasPrefixFold reports whether a JSON string begins with prefix, ignoring case. prefix must be in lower case.
func (s *scanner) hasPrefixFold(v scannedValue, prefix string) bool {
	text, _ := s.prefix(v)
	return len(text) >= len(prefix) && bytes.EqualFold(text[:len(prefix)], []byte(prefix))
}

// printableText returns text of a request in a form that is safe in an error message.
func printableText(s string) string { return egress.QuotePrefix(s) }

// maxModelNameBytes is the maximum length in bytes of the name of a model; the rest is cut.
const maxModelNameBytes = 200

// checkModel stores the name of the model that the request names. It refuses a model that searches the web, unless the allowlist allows
// that, and a name that is too long to be searched.
func (s *scanner) checkModel(_ []byte, v scannedValue) error {
	text, whole := s.prefix(v)
	if !whole {
		return s.unreadableError(fmt.Sprintf("the name of a model with more than %d bytes", maxTextBytes))
	}
	name := string(text)
	s.model = strings.ToValidUTF8(truncate.Prefix(name, maxModelNameBytes), "")
	// Some models search the web without a tool.
	if strings.Contains(name, "-search-preview") || strings.Contains(name, "-search-api") || strings.HasSuffix(name, ":online") {
		return s.requireFeature("web_search", "model "+printableText(name)+", which searches the web")
	}
	return nil
}

// checkPrompt refuses a prompt that is stored at the provider, unless the allowlist allows it.
func (s *scanner) checkPrompt(_ []byte, v scannedValue) error {
	if v.kind != '{' { // the prompt of Completions is a string
		return nil
	}
	return s.requireFeature(egress.FeatureUseStored, "a stored prompt")
}

// checkBackground refuses a response in the background.
func (s *scanner) checkBackground(_ []byte, v scannedValue) error {
	if !v.present {
		return nil
	}
	return s.requireFeature("", "a response in the background, whose usage cannot be metered")
}

// checkWebSearch refuses options that enable a web search, unless the allowlist allows it.
func (s *scanner) checkWebSearch(key []byte, v scannedValue) error {
	if v.kind == 'n' || v.kind == 'f' { // an empty object enables the search
		return nil
	}
	return s.requireFeature("web_search", string(key))
}

// checkFileData refuses a URL in place of a file's data, unless the allowlist allows it.
func (s *scanner) checkFileData(_ []byte, v scannedValue) error {
	if !s.hasPrefixFold(v, "http") {
		return nil
	}
	return s.requireFeature(egress.FeatureFetchURL, "a URL at file_data")
}

// checkAnthropicBlock checks a message or a content block of Anthropic's API.
func (s *scanner) checkAnthropicBlock(o *objectState) error {
	switch {
	case string(o.typ) == "container_upload":
		return s.requireFeature(egress.FeatureReadFile, "a file for a container")
	case o.marks&hasURL != 0 && string(o.typ) != "web_search_result" && string(o.typ) != "web_fetch_result":
		return s.requireFeature(egress.FeatureFetchURL, "a URL in a block of type "+printableText(string(o.typ)))
	}
	return nil
}

// checkAnthropicSource checks the source of an image or a document in a request to Anthropic's API.
func (s *scanner) checkAnthropicSource(o *objectState) error {
	switch string(o.typ) {
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
	return s.requireFeature("", "a source of type "+printableText(string(o.typ))+", which is not known")
}

// allowedAnthropicTools are the types of tools that need no permission in requests to Anthropic's API: the client runs these tools, or
// they use only the content of the request.
var allowedAnthropicTools = map[string]bool{
	"custom": true, "bash": true, "text_editor": true, "computer": true, "memory": true, "tool_search_tool_regex": true, "tool_search_tool_bm25": true,
}

// checkAnthropicTool checks a tool definition in a request to Anthropic's API.
func (s *scanner) checkAnthropicTool(o *objectState) error {
	typ := withoutDate(o.typ)
	if !o.typed || allowedAnthropicTools[string(typ)] {
		return nil
	}
	name := string(typ)
	if name == "mcp_toolset" {
		name = "mcp"
	}
	return s.checkServerTool(name, o)
}

// allowedOpenAITools are the types of tools that need no permission in requests to OpenAI's API: the client runs these tools, or they use
// only the content of the request.
var allowedOpenAITools = map[string]bool{"function": true, "custom": true, "namespace": true, "local_shell": true, "apply_patch": true, "tool_search": true}

// checkOpenAITool checks a tool definition in a request to OpenAI's API.
func (s *scanner) checkOpenAITool(o *objectState) error {
	typ := withoutDate(o.typ)
	if allowedOpenAITools[string(typ)] || !o.typed && o.marks&hasSchema != 0 {
		return nil
	}
	name := string(typ)
	switch {
	case name == "shell" && o.marks&hasEnvironment != 0: // its environment is checked instead
		return nil
	case name == "web_search_preview":
		name = "web_search"
	case name == "computer_use_preview" || name == "computer":
		name = "computer_use"
	}
	return s.checkServerTool(name, o)
}

// checkServerTool checks a tool that the model provider runs: the allowlist must allow the tool, and its type must be known. name is the
// type without a date.
func (s *scanner) checkServerTool(name string, o *objectState) error {
	if name == egress.FeatureFetchURL || name == egress.FeatureReadFile || name == egress.FeatureUseStored || !egress.IsProviderFeature(name) {
		return s.requireFeature("", "a tool of type "+printableText(string(o.typ))+", which is not known")
	}
	return s.requireFeature(name, "the tool "+printableText(string(o.typ)))
}

// checkOpenAIEnvironment checks where a shell tool of a model request runs: the allowlist must allow a shell in a container
// of OpenAI.
func (s *scanner) checkOpenAIEnvironment(o *objectState) error {
	if string(o.typ) == "local" {
		return nil
	}
	return s.requireFeature("shell", "a shell in a container of the provider")
}

// checkOpenAIInput checks an element of the field input in a request to OpenAI's Responses API.
func (s *scanner) checkOpenAIInput(o *objectState) error {
	if !o.typed && o.marks&hasRole == 0 && o.marks&hasID != 0 {
		return s.requireFeature(egress.FeatureUseStored, "an item by its id")
	}
	return s.checkOpenAIItem(o)
}

// checkOpenAIItem refuses items that refer to content stored at OpenAI, unless the allowlist allows it.
func (s *scanner) checkOpenAIItem(o *objectState) error {
	switch {
	case string(o.typ) == "item_reference":
		return s.requireFeature(egress.FeatureUseStored, "an item by its id")
	case string(o.typ) == "reasoning" && o.marks&(hasID|hasEncrypted) == hasID:
		return s.requireFeature(egress.FeatureUseStored, "reasoning by its id")
	case string(o.typ) == "image_generation_call" && o.marks&hasID != 0:
		return s.requireFeature("image_generation", "an image by its id")
	}
	return nil
}

// withoutDate returns the type of a tool without the date that some types end with, as web_search_20250305 does.
func withoutDate(typ []byte) []byte {
	for _, form := range []string{"_dddddddd", "_dddd_dd_dd"} {
		if n := len(typ) - len(form); n > 0 && matchesDigitPattern(typ[n:], form) {
			return typ[:n]
		}
	}
	return typ
}

// matchesDigitPattern reports whether text matches form, in which a d stands for any digit.
func matchesDigitPattern(text []byte, form string) bool {
	for i := range len(form) {
		if c := text[i]; form[i] == 'd' && (c < '0' || c > '9') || form[i] != 'd' && c != form[i] {
			return false
		}
	}
	return true
}
