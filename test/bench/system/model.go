package system

import (
	"context"

	"github.com/spoolhq/spool/cmd/mockllm/server"
)

// EchoScript is a script for StartModel, in mockllm's format. The model answers every message at once, with the text of the
// message.
const EchoScript = `
rules:
  - steps:
      - text: 'You said {{user}}.'
`

// StartModel starts a model server in this process that answers by a script in mockllm's format. It returns the
// server's URL, without /v1, and a function that stops the server.
func StartModel(script string) (url string, stop func() error, err error) {
	s, err := server.ParseScript("bench.yaml", []byte(script))
	if err != nil {
		return "", nil, err
	}
	m, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: s, MaxRecorded: 1})
	if err != nil {
		return "", nil, err
	}
	if err := m.Listen(); err != nil {
		return "", nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	return m.URL(), func() error { cancel(); return <-ended }, nil
}
