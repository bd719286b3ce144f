package gateway_test

import (
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/gateway"
)

// TestDownloads_HaveAMinimumRate tests that a download that the client reads slower than 16 KiB per second is aborted
// on every route and returns its bytes, and that a slow but steady one completes even if it takes longer than
// SPOOL_READ_TIMEOUT. The clients use HTTP/2, where the window of a stream bounds what is sent to a client that does
// not read; with HTTP/1.1 the kernel buffers some MiB.
func TestDownloads_HaveAMinimumRate(t *testing.T) {
	t.Parallel()
	w, dir := newWorld(t), t.TempDir()
	w.serveCommands()
	pool := writeCertificate(t, dir, time.Now(), time.Hour)
	g := w.gateway(gateway.Config{TLSCert: filepath.Join(dir, certificate.CertificateFile), TLSKey: filepath.Join(dir, certificate.KeyFile), ReadTimeout: time.Second}).withTrustedPool(pool)
	g.http.Transport.(*http.Transport).HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10, MaxReceiveBufferPerConnection: 1 << 20}
	id := w.session("default")
	large, small := strings.Repeat("x", 4<<20), strings.Repeat("y", 400<<10)
	w.snapshot("default", id, snapshotTime, [2]string{"large", large}, [2]string{"small", small})
	files := "/api/sessions/" + id + "/files"

	// read reads n bytes ten times a second, and returns the number of bytes received.
	read := func(path, accept string, n int) (int, error) {
		req, err := http.NewRequestWithContext(t.Context(), "GET", g.url+path, nil)
		if err != nil {
			return 0, err
		}
		req.Header.Set("Accept", accept)
		resp, err := g.http.Do(req)
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		if resp.ProtoMajor != 2 || resp.StatusCode != 200 {
			return 0, errors.New(resp.Proto + " " + resp.Status)
		}
		buffer, began := make([]byte, n), time.Now()
		for total := 0; ; time.Sleep(100 * time.Millisecond) {
			n, err := io.ReadFull(resp.Body, buffer)
			switch total += n; {
			case err == io.EOF || err == io.ErrUnexpectedEOF && resp.ContentLength == int64(total):
				return total, nil
			case err != nil || time.Since(began) > patience:
				return total, err
			}
		}
	}
	t.Run("", func(t *testing.T) { // ends when all subtests have ended
		for name, slow := range map[string]struct{ path, accept string }{
			"a file": {files + "/large", "*/*"}, "a tar": {files, "application/x-tar"},
		} {
			t.Run(name+" that is read too slowly", func(t *testing.T) {
				t.Parallel()
				if n, err := read(slow.path, slow.accept, 200); err == nil {
					t.Errorf("%d bytes came without an error", n)
				}
			})
		}
		t.Run("a file that is read steadily", func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			if n, err := read(files+"/small", "*/*", 8<<10); n != len(small) || err != nil {
				t.Errorf("%d bytes of %d came, %v", n, len(small), err)
			}
			if took := time.Since(began); took < 2*time.Second {
				t.Errorf("the download took only %s, so the test shows nothing", took)
			}
		})
	})
	g.wantMetric(t, "spool_gateway_held_bytes 0")
}
