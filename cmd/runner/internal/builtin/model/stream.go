package model

import (
	"bytes"
	"errors"
	"io"
	"net/http"
)

const (
	// maxFailureBytes is the maximum number of bytes of an error's body that are read.
	maxFailureBytes = 64 << 10
	// maxEmptyChunks is the maximum number of chunks without a part of the answer that precede the first part.
	maxEmptyChunks = 1000
)

// answerStream reads the chunks of an answer.
type answerStream struct {
	body   io.ReadCloser
	events *eventReader
	ahead  []wireChunk // read by awaitAnswer, and not returned yet
	end    error       // after ahead; nil if it is not known yet
}

// progressReader calls progress after every read that returns bytes.
type progressReader struct {
	io.ReadCloser
	progress func()
}

// Read implements io.Reader.
func (p progressReader) Read(b []byte) (int, error) {
	n, err := p.ReadCloser.Read(b)
	if n > 0 {
		p.progress()
	}
	return n, err
}

// awaitAnswer reads the answer up to its first part and returns the stream with all of it. It returns a failure instead if the answer is an error
// with an HTTP status, also one that comes within a stream with status 200 before a part of the answer. That status becomes the status of res, so that
// the client retries the request as if the endpoint had answered with it. progress is called for everything that is received.
func awaitAnswer(res *http.Response, progress func()) (*answerStream, *failure) {
	body := progressReader{res.Body, progress}
	if res.StatusCode >= http.StatusBadRequest {
		raw, _ := io.ReadAll(io.LimitReader(body, maxFailureBytes)) //nolint:errcheck // what arrived is used
		res.Body = bodyOf(raw, res.Body)
		return nil, parseFailure(raw, res.StatusCode)
	}
	s := &answerStream{body: body, events: newEventReader(body)}
	for s.end == nil && len(s.ahead) < maxEmptyChunks {
		c, err := s.read()
		if err != nil {
			s.end = err
			break
		}
		s.ahead = append(s.ahead, c)
		if !c.isEmpty() {
			return s, nil
		}
	}
	var f *failure
	if !errors.As(s.end, &f) || f.status == 0 {
		return s, nil // next returns the error
	}
	res.StatusCode, res.Body = f.status, bodyOf(nil, res.Body)
	return nil, f
}

// bodyOf returns a body with the content raw that closes the body before.
func bodyOf(raw []byte, before io.Closer) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{bytes.NewReader(raw), before}
}

// next returns the next chunk. It returns io.EOF after the last one, and a *failure for an error that the endpoint reports.
func (s *answerStream) next() (wireChunk, error) {
	if len(s.ahead) > 0 {
		c := s.ahead[0]
		s.ahead = s.ahead[1:]
		return c, nil
	}
	if s.end != nil {
		return wireChunk{}, s.end
	}
	return s.read()
}

// read reads and decodes the next chunk.
func (s *answerStream) read() (wireChunk, error) {
	ev, err := s.events.next()
	if err != nil {
		return wireChunk{}, err
	}
	if bytes.HasPrefix(bytes.TrimSpace(ev.data), []byte("[DONE]")) {
		return wireChunk{}, io.EOF
	}
	return decodeChunk(ev)
}
