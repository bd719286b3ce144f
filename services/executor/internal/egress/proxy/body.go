package proxy

import (
	"errors"
	"io"
)

// ending is a request's body whose end stays its end. A transport looks for the
// end once more after the last byte. By then the server may have closed the body,
// because the answer to a fast endpoint's is on its way: read again, that would be
// an error, for which the transport gives up the connection, and the answer with it.
type ending struct {
	io.ReadCloser
	over bool
}

func (e *ending) Read(p []byte) (int, error) {
	if e.over {
		return 0, io.EOF
	}
	n, err := e.ReadCloser.Read(p)
	e.over = errors.Is(err, io.EOF)
	return n, err
}
