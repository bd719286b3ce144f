package server_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
)

func tool(name string) openai.ChatCompletionToolUnionParam {
	return openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{Name: name})
}

// The built-in script runs with the tools of the built-in agent: its last text is the output of the program.
func TestDefaultWritesAProgramAndRunsIt(t *testing.T) {
	t.Parallel()
	_, url := start(t, "")
	c, dir := client(url), t.TempDir()
	p := chatParams("Write a program that prints the first ten primes, and run it.")
	p.Tools = []openai.ChatCompletionToolUnionParam{tool("read_file"), tool("write_file"), tool("list_directory"), tool("run_code")}
	var called []string
	for range 4 {
		res, err := chatOnce(t, c, p, true)
		if err != nil {
			t.Fatal(err)
		}
		message := res.Choices[0].Message
		if len(message.ToolCalls) == 0 {
			if got := strings.Join(called, " "); got != "write_file run_code" {
				t.Errorf("called %s", got)
			}
			if !strings.Contains(message.Content, "    29\n    sum 129") {
				t.Errorf("it said %q", message.Content)
			}
			return
		}
		p.Messages = append(p.Messages, message.ToParam())
		for _, call := range message.ToolCalls {
			called = append(called, call.Function.Name)
			p.Messages = append(p.Messages, openai.ToolMessage(carryOut(t, dir, call.Function.Name, call.Function.Arguments), call.ID))
		}
	}
	t.Error("it never stopped calling tools")
}

func carryOut(t *testing.T, dir, name, arguments string) string {
	t.Helper()
	var in struct{ Path, Content, Language, Code string }
	if err := json.Unmarshal([]byte(arguments), &in); err != nil {
		t.Fatal(err)
	}
	if name == "write_file" {
		if err := os.WriteFile(filepath.Join(dir, in.Path), []byte(in.Content), 0o600); err != nil {
			t.Fatal(err)
		}
		return "written"
	}
	cmd := exec.CommandContext(t.Context(), in.Language, "-c", in.Code)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", in.Code, err, out)
	}
	return string(out)
}

func TestDefaultMemory(t *testing.T) {
	t.Parallel()
	_, url := start(t, "")
	cases := []struct {
		name string
		said []string
		want string
	}{
		{"told", []string{"Remember the number 42."}, "I will remember the number 42."},
		{"asked", []string{"Please remember that my cat is called Tiger!", "What did I ask you to remember?"}, "You asked me to remember my cat is called Tiger."},
		{"the newest", []string{"remember 1", "remember 2", "what should you remember"}, "You asked me to remember 2."},
		{"never told", []string{"hello", "What did I ask you to remember?"}, "You have not asked me to remember anything."},
		{"echo", []string{"hello <you> & me"}, "You said: hello <you> & me"},
		{"without tools", []string{"write a program and run it"}, "You said: write a program and run it"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := answerText(t, url, say(false, c.said...)); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
