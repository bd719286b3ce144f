// Package server is a scripted model server. It implements Anthropic Messages, OpenAI Responses and OpenAI Chat
// Completions well enough that agent CLIs and client libraries cannot distinguish it from the real services. A script
// determines the answers, which depend only on the conversation that the client sends.
//
// docs/mockllm.md describes the script.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// Config configures a Server. All fields are optional.
type Config struct {
	Listen       string       // address; "" means 127.0.0.1:7799, port 0 any free one
	Script       *Script      // nil means the built-in script
	Logger       *slog.Logger // nil discards
	MaxBody      int64        // largest request in bytes; 0 means 32 MiB
	MaxRecorded  int          // requests kept; 0 means 512
	MaxRecordedB int64        // bytes of bodies kept; 0 means 64 MiB
	// Now returns the time in answers; nil means time.Now.
	Now func() time.Time
}

// Server is a model server whose answers are defined by a script. It is an http.Handler, usable without Listen and Run,
// and safe for concurrent use.
type Server struct {
	config   Config
	script   *Script
	log      *slog.Logger
	mux      *http.ServeMux
	counts   useCounts
	records  requestLog
	listener net.Listener
}

// New returns a Server with the configuration c, or an error if c is invalid.
func New(c Config) (*Server, error) {
	if c.MaxBody < 0 || c.MaxRecorded < 0 || c.MaxRecordedB < 0 {
		return nil, errors.New("mockllm: MaxBody, MaxRecorded and MaxRecordedB must not be negative")
	}
	if c.Script == nil {
		script, err := DefaultScript()
		if err != nil {
			return nil, err
		}
		c.Script = script
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:7799"
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.MaxBody == 0 {
		c.MaxBody = 32 << 20
	}
	if c.MaxRecorded == 0 {
		c.MaxRecorded = 512
	}
	if c.MaxRecordedB == 0 {
		c.MaxRecordedB = 64 << 20
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	s := &Server{config: c, script: c.Script, log: c.Logger, records: requestLog{max: c.MaxRecorded, maxBytes: c.MaxRecordedB}}
	s.registerRoutes()
	return s, nil
}

// Listen opens the listening socket, so that URL returns the address before Run is called.
func (s *Server) Listen() error {
	l, err := net.Listen("tcp", s.config.Listen)
	if err != nil {
		return fmt.Errorf("mockllm: listen on %s: %w", s.config.Listen, err)
	}
	s.listener = l
	return nil
}

// URL returns the server's base URL, without a trailing slash. It must be called after Listen.
func (s *Server) URL() string {
	if s.listener == nil {
		return ""
	}
	return "http://" + s.listener.Addr().String()
}

// Run serves requests until ctx ends, which also ends answers in progress. It calls Listen unless Listen was called
// before.
func (s *Server) Run(ctx context.Context) error {
	if s.listener == nil {
		if err := s.Listen(); err != nil {
			return err
		}
	}
	// Running answers end with the context: an endless answer would block a graceful shutdown.
	server := &http.Server{Handler: s, BaseContext: func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second}
	s.log.Info("mockllm is listening", "url", s.URL())
	served := make(chan error, 1)
	go func() { served <- server.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("mockllm: serve: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err := server.Shutdown(stop)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	<-served
	if err != nil {
		return fmt.Errorf("mockllm: stop: %w", err)
	}
	return nil
}

// ServeHTTP answers one request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

func (s *Server) registerRoutes() {
	s.mux = http.NewServeMux()
	s.mux.HandleFunc("POST /v1/messages", s.answerHandler(anthropicDialect{}))
	s.mux.HandleFunc("POST /v1/messages/count_tokens", s.handleCountTokens)
	s.mux.HandleFunc("POST /v1/responses", s.answerHandler(responsesDialect{}))
	s.mux.HandleFunc("POST /v1/chat/completions", s.answerHandler(chatDialect{}))
	s.mux.HandleFunc("GET /v1/models", s.handleListModels)
	s.mux.HandleFunc("GET /v1/models/{id...}", s.handleGetModel)
	s.mux.HandleFunc("GET /__requests", s.handleListRequests)
	s.mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		s.records.addRequest(r, s.config.Now()).setOutcome("complete")
		s.writeJSON(w, http.StatusOK, orderedObject{"name", "mockllm"}) // HEAD / asks whether the service is there
	})
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		rec := s.records.addRequest(r, s.config.Now())
		rec.setOutcome(s.sendError(w, guessDialect(r), &apiError{status: http.StatusNotFound, message: "mockllm: no route " + r.Method + " " + r.URL.Path}))
	})
}

// ServeScript loads the script at path, or the built-in script if path is empty, and serves it on the address listen
// until ctx ends.
func ServeScript(ctx context.Context, listen, path string, log *slog.Logger) error {
	c := Config{Listen: listen, Logger: log}
	if path != "" {
		script, err := LoadScript(path)
		if err != nil {
			return err
		}
		c.Script = script
	}
	s, err := New(c)
	if err != nil {
		return err
	}
	return s.Run(ctx)
}
