package gateway_test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/workspace/wire"
	"github.com/spoolhq/spool/services/gateway"
)

func (w *world) bucket() jetstream.ObjectStore {
	w.t.Helper()
	b, err := w.js.ObjectStore(w.t.Context(), topology.BucketWorkspaces)
	must(w.t, err)
	return b
}

// snapshot stores files and emits the event, like an executor. A path that ends in / is a folder, one that begins
// with @ a link.
func (w *world) snapshot(tenant, session string, at time.Time, files ...[2]string) (id string) {
	w.t.Helper()
	tree := wire.NewTreeValidator()
	lines, pack, places, known := []string{wire.HeaderV1}, []byte{}, []string{}, map[wire.Hash]bool{}
	for _, f := range files {
		e := wire.Entry{Path: wire.TreeWorkspace + "/" + strings.Trim(f[0], "/@"), Kind: wire.KindFile, Mode: 0o644, ModTime: at}
		switch {
		case strings.HasSuffix(f[0], "/"):
			e.Kind, e.Mode = wire.KindDir, 0o755
		case strings.HasPrefix(f[0], "@"):
			e.Kind, e.Mode, e.ModTime, e.Target = wire.KindSymlink, 0, time.Time{}, f[1]
		default:
			e.Size = int64(len(f[1]))
			for block := range chunks(f[1], wire.BlockSize) {
				hash := wire.HashOf([]byte(block))
				e.Blocks = append(e.Blocks, hash)
				if known[hash] {
					continue
				}
				known[hash] = true
				places = append(places, fmt.Sprint(len(places), ",", len(pack)))
				pack = append(pack, block...)
			}
		}
		line, err := tree.Add(&e)
		must(w.t, err)
		lines = append(lines, string(line))
	}
	sum := sha256.Sum256(pack)
	lines = append(lines, fmt.Sprintf(`{"pack":"%x","size":%d,"blocks":[%s]}`, sum, len(pack), strings.Join(places, ",")))
	z, err := zstd.NewWriter(nil)
	must(w.t, err)
	manifest := z.EncodeAll([]byte(strings.Join(lines, "\n")+"\n"), nil)
	must(w.t, z.Close())
	id = tree.ID()
	for name, content := range map[string][]byte{id: manifest, "p-" + hex.EncodeToString(sum[:]): pack} {
		_, err := w.bucket().PutBytes(w.t.Context(), tenant+"/"+session+"/"+name, content)
		must(w.t, err)
	}
	w.emit(tenant, session, events.Event{Time: at, Data: events.WorkspaceSynced{Snapshot: id, Files: uint32(len(files))}})
	return id
}

func chunks(s string, size int) func(func(string) bool) {
	return func(yield func(string) bool) {
		for len(s) > 0 {
			n := min(size, len(s))
			if !yield(s[:n]) {
				return
			}
			s = s[n:]
		}
	}
}

func sum(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

var snapshotTime = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

// TestWorkspaceFiles_AreStoredBeforeTheCommand tests that files of a session or message are stored before the command that refers to them is
// sent.
func TestWorkspaceFiles_AreStoredBeforeTheCommand(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	const files = `"workspaceFiles":[{"path":"a/b.sh","content":"echo é\n","mode":493},{"path":"bin","contentBase64":"AAH/"},{"path":"empty","content":""}]`
	made := g.do("POST", "/api/sessions", `{"architecture":"acp","sessionOptions":{"image":"agents:2","command":["agent"],"egress":["pypi.org"],"syncIntervalMs":5000,"healthIntervalMs":6000,"sandboxMaxAgeMs":7000},`+files+`}`).want(t, 201)
	id := made.text("sessionId")
	g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"x",`+files+`}`).want(t, 202)
	started := g.do("POST", "/api/executions", `{"content":"x",`+files+`}`).want(t, 202)
	want := []command.File{
		{Path: "a/b.sh", Size: 8, SHA256: sum("echo é\n"), Mode: 0o755}, {Path: "bin", Size: 3, SHA256: sum("\x00\x01\xff")}, {Path: "empty", SHA256: sum("")},
	}
	for _, c := range s.commands(t) {
		var b struct {
			Files []command.File
			Post  struct{ Files []command.File }
		}
		must(t, json.Unmarshal(c.Body, &b))
		if got := append(b.Files, b.Post.Files...); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s has files %+v, want %+v", c.Type, got, want)
		}
	}
	for _, session := range []string{id, started.text("sessionId")} {
		for _, content := range []string{"echo é\n", "\x00\x01\xff", ""} {
			got, err := w.bucket().GetBytes(t.Context(), command.FileObject("default", session, sum(content)))
			if err != nil || string(got) != content {
				t.Errorf("stored %q, %v; want %q", got, err, content)
			}
		}
	}
	one := g.get("/api/sessions/"+id).want(t, 200)
	if o := one.field("sessionOptions"); fmt.Sprint(o) != "map[command:[agent] egress:[pypi.org] healthIntervalMs:6000 idleTimeoutMs:0 image:agents:2 model: modelProvider: onConversationLoss: sandboxMaxAgeMs:7000 sessionLimitMs:0 syncIntervalMs:5000 turnLimitMs:0]" {
		t.Errorf("options are %v", o)
	}
	// A repeat under the same key is one command, and its files are stored already.
	body := `{"content":"again",` + files + `}`
	first := g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", "k")).want(t, 202)
	if again := g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", "k")).want(t, 202); again.text("executionId") != first.text("executionId") {
		t.Errorf("a repeat is another execution: %s, %s", first, again)
	}
	// A request with files may be larger than others, up to the setting.
	large := `{"workspaceFiles":[{"path":"large","content":"` + strings.Repeat("x", 8<<20) + `"}]}`
	g.do("POST", "/api/sessions", large).want(t, 201)
	w.gateway(gateway.Config{MaxRequest: 8 << 20}).do("POST", "/api/sessions", large).wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "")
}

// TestWorkspaceFiles_WithoutAnObjectStoreNoCommandIsSent tests that without an object store no command is sent, and that the request's key can
// be used again.
func TestWorkspaceFiles_WithoutAnObjectStoreNoCommandIsSent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	must(t, w.js.DeleteObjectStore(t.Context(), topology.BucketWorkspaces))
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	const body = `{"content":"x","workspaceFiles":[{"path":"a","content":"b"}]}`
	g.do("POST", "/api/sessions/"+id+"/messages", body, header("Idempotency-Key", "k")).wantProblem(t, 503, "UNAVAILABLE", "")
	g.do("PUT", "/api/sessions/"+id+"/files/a", "b").wantProblem(t, 503, "UNAVAILABLE", "")
	if n := len(s.commands(t)); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
	g.do("POST", "/api/sessions/"+id+"/messages", `{"content":"without"}`, header("Idempotency-Key", "k")).want(t, 202)
}

func TestPutFile_StoresContentAndSendsACommand(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	at := "/api/sessions/" + id + "/files"
	content := strings.Repeat("0123456789abcdef", 200_000) // 3.2 MB, several chunks
	put := g.do("PUT", at+"/dir/%C3%BC%20%2B.txt?mode=755", content).want(t, 202)
	if put.text("sha256") != sum(content) || put.field("size") != json.Number(fmt.Sprint(len(content))) || put.text("position") == "" {
		t.Errorf("got %s", put)
	}
	var archive bytes.Buffer
	tw := tar.NewWriter(&archive)
	must(t, tw.WriteHeader(&tar.Header{Name: "x", Size: 1, Mode: 0o644}))
	_, err := tw.Write([]byte("y"))
	must(t, err)
	must(t, tw.Close())
	g.do("PUT", at+"?dir=sub", archive.String(), header("Content-Type", "application/x-tar")).want(t, 202)
	g.do("PUT", at+"/empty", "").want(t, 202)
	if a := g.do("DELETE", at+"/dir", "").want(t, 202); a.text("position") == "" {
		t.Errorf("got %s", a)
	}
	var got []string
	for _, c := range s.commands(t) {
		var f command.File
		must(t, json.Unmarshal(c.Body, &f))
		got = append(got, fmt.Sprintf("%s %s %d %o %v", c.Type, f.Path, f.Size, f.Mode, f.Archive))
		if c.Type == command.TypeRemoveFile {
			continue
		}
		stored, err := w.bucket().GetBytes(t.Context(), f.Object)
		if err != nil || sum(string(stored)) != f.SHA256 || !strings.HasPrefix(f.Object, "default/"+id+"/") {
			t.Errorf("%s: object %s has %d bytes, %v", f.Path, f.Object, len(stored), err)
		}
	}
	want := fmt.Sprintf("put_file dir/ü +.txt %d 755 false,put_file sub %d 0 true,put_file empty 0 0 false,remove_file dir 0 0 false", len(content), archive.Len())
	if strings.Join(got, ",") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ","), want)
	}
}

// TestPutFile_RefusesMoreThanTheLimit tests that a body over the limit is refused, and that not more than the limit is read.
func TestPutFile_RefusesMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{MaxFile: 1 << 20})
	id := w.session("default")
	for name, head := range map[string]string{"announced": "Content-Length: 5368709120", "not announced": "Transfer-Encoding: chunked"} {
		resp, sent := g.endless("PUT", "/api/sessions/"+id+"/files/a", head)
		a := resp.wantProblem(t, 413, "PAYLOAD_TOO_LARGE", "file")
		if !strings.Contains(a.text("detail"), "1048576") {
			t.Errorf("%s: the limit is not named: %s", name, a)
		}
		if sent > 4<<20+inConnection(t) {
			t.Errorf("%s: %d bytes were taken", name, sent)
		}
	}
	g.do("PUT", "/api/sessions/"+id+"/files/a", strings.Repeat("x", 1<<20)).want(t, 202)
	if n := len(s.commands(t)); n != 1 {
		t.Errorf("%d commands were sent, want only the one of the file that fits", n)
	}
}

// inConnection returns the largest number of bytes that both buffers of a connection hold.
func inConnection(t *testing.T) (bytes int64) {
	t.Helper()
	for _, setting := range []string{"tcp_rmem", "tcp_wmem"} {
		raw, err := os.ReadFile("/proc/sys/net/ipv4/" + setting)
		must(t, err)
		var least, initial, most int64
		_, err = fmt.Sscan(string(raw), &least, &initial, &most)
		must(t, err)
		bytes += most
	}
	return bytes
}

// endless sends a body that never ends, like a client that reads while it writes. Go's client may detect the closed
// connection before it reads the answer.
func (g *served) endless(method, path, head string) (a answer, sent int64) {
	g.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(g.url, "http://"))
	must(g.t, err)
	defer conn.Close() //nolint:errcheck // the server has closed the connection
	_, err = fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n", method, path, head)
	must(g.t, err)
	piece := strings.Repeat("x", 32<<10)
	if strings.HasPrefix(head, "Transfer") {
		piece = fmt.Sprintf("%x\r\n%s\r\n", len(piece), piece)
	}
	written := make(chan int64, 1)
	go func() {
		var n int64
		for {
			k, err := io.WriteString(conn, piece)
			if n += int64(k); err != nil {
				written <- n
				return
			}
		}
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	must(g.t, err)
	text, err := io.ReadAll(resp.Body)
	must(g.t, err)
	must(g.t, resp.Body.Close())
	return answer{resp.StatusCode, resp.Header, text}, <-written
}

// TestPutFile_AbortedUploadChangesNothing tests that a client that disconnects during an upload causes no change.
func TestPutFile_AbortedUploadChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	r, wr := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), "PUT", g.url+"/api/sessions/"+id+"/files/a", r)
	must(t, err)
	go func() {
		_, _ = wr.Write(make([]byte, 1<<20))
		wr.CloseWithError(errors.New("gone"))
	}()
	resp, err := client.Do(req)
	if err == nil {
		must(t, resp.Body.Close())
		t.Fatalf("answered %d", resp.StatusCode)
	}
	g.stop() // waits for the request
	if n := len(s.commands(t)); n != 0 {
		t.Errorf("%d commands were sent", n)
	}
}

// TestFiles_WaitForTheSnapshotOfTheLastTurn tests that a client that has seen a turn end gets its files, even if the snapshot is
// completed later.
func TestFiles_WaitForTheSnapshotOfTheLastTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	x, ended := newID(t, events.KindExecution), time.Now().UTC()
	w.emit("default", id,
		events.Event{Time: ended, ExecutionID: x, Data: events.MessageAccepted{BlockID: "b", Content: "go"}},
		events.Event{Time: ended, ExecutionID: x, Data: events.ExecutionCompleted{Result: "done"}})
	got := make(chan answer, 1)
	go func() { got <- g.get("/api/sessions/" + id + "/files/a") }()
	select {
	case a := <-got:
		t.Fatalf("answered before the snapshot: %s", a)
	case <-time.After(300 * time.Millisecond): // the request is waiting
	}
	w.snapshot("default", id, ended.Add(time.Millisecond), [2]string{"a", "one"})
	if a := (<-got).want(t, 200); string(a.body) != "one" {
		t.Errorf("got %s", a)
	}
}

func TestFiles_AreServedFromTheLastSnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	at := "/api/sessions/" + id + "/files"
	for _, path := range []string{"", "/a"} {
		if a := g.get(at+path).wantProblem(t, 404, "NO_SNAPSHOT", "sessionId"); !strings.Contains(a.text("detail"), "/sync") {
			t.Errorf("no hint: %s", a)
		}
	}
	large := strings.Repeat("0123456789abcdef", 150_000) // three blocks
	snap := w.snapshot("default", id, snapshotTime, [2]string{"a.html", "<script>alert(1)</script>"}, [2]string{"dir/"}, [2]string{"dir/empty"},
		[2]string{"dir/large", large}, [2]string{"@link", "/etc/passwd"})
	exe := newID(t, events.KindExecution)
	w.emit("default", id, events.Event{ExecutionID: exe, Data: events.FileModified{Path: "dir/large", Size: 1}})

	list := g.get(at).want(t, 200)
	want := `{"at":"2026-03-04T05:06:07Z","snapshot":"` + snap + `","files":[` +
		`{"path":"a.html","kind":"file","size":25,"mode":420,"modTime":"2026-03-04T05:06:07Z","sha256":"` + sum("<script>alert(1)</script>") + `","etag":"` + sum("<script>alert(1)</script>") + `"},` +
		`{"path":"dir","kind":"dir","size":0,"mode":493,"modTime":"2026-03-04T05:06:07Z"},` +
		`{"path":"dir/empty","kind":"file","size":0,"mode":420,"modTime":"2026-03-04T05:06:07Z","sha256":"` + sum("") + `","etag":"` + sum("") + `"},` +
		`{"path":"dir/large","kind":"file","size":2400000,"mode":420,"modTime":"2026-03-04T05:06:07Z","etag":"ETAG","executionId":"` + exe + `"},` +
		`{"path":"link","kind":"symlink","size":0,"mode":0,"target":"/etc/passwd"}]}` + "\n"
	get := g.get(at+"/dir/large").want(t, 200)
	tag := get.header.Get("ETag")
	if want := strings.ReplaceAll(want, "ETAG", strings.Trim(tag, `"`)); string(list.body) != want {
		t.Errorf("got  %s\nwant %s", list.body, want)
	}
	if sub := g.get(at+"?dir=dir").want(t, 200); strings.Count(string(sub.body), `"path"`) != 2 {
		t.Errorf("got %s", sub)
	}
	if string(get.body) != large || get.header.Get("Content-Length") != "2400000" || !strings.HasPrefix(tag, `"b-`) {
		t.Errorf("got %d bytes, %v", len(get.body), get.header)
	}
	html := g.get(at+"/a.html").want(t, 200)
	for name, want := range map[string]string{
		"Content-Type": "text/html; charset=utf-8", "Content-Disposition": `attachment; filename="a.html"`, "X-Content-Type-Options": "nosniff",
		"Content-Security-Policy": "default-src 'none'; sandbox", "ETag": `"` + sum("<script>alert(1)</script>") + `"`,
	} {
		if got := html.header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if a := g.get(at+"/dir/empty").want(t, 200); len(a.body) != 0 {
		t.Errorf("got %s", a)
	}
	if a := g.get(at+"/dir/large", header("Range", "bytes=2399990-")).want(t, 206); string(a.body) != "6789abcdef" || a.header.Get("Content-Range") != "bytes 2399990-2399999/2400000" {
		t.Errorf("got %s %v", a, a.header)
	}
	if a := g.get(at+"/dir/large", header("Range", "bytes=0-1,5-6")).want(t, 200); len(a.body) != len(large) {
		t.Errorf("many ranges: %d bytes", len(a.body))
	}
	if a := g.get(at+"/dir/large", header("If-None-Match", tag)).want(t, 304); len(a.body) != 0 {
		t.Errorf("got %d bytes", len(a.body))
	}
	if a := g.do("HEAD", at+"/dir/large", "").want(t, 200); len(a.body) != 0 || a.header.Get("Content-Length") != "2400000" {
		t.Errorf("got %v", a.header)
	}
	for path, field := range map[string]string{"/nothing": "path", "/dir": "path", "/link": "path", "?dir=nothing": "dir", "?dir=a.html": "dir", "?dir=link": "dir"} {
		g.get(at+path).wantProblem(t, 404, "FILE_NOT_FOUND", field)
	}
	archive := g.get(at, header("Accept", "text/plain;q=0.1, application/x-tar")).want(t, 200)
	if got := archive.header.Get("Content-Type") + archive.header.Get("Content-Disposition"); got != `application/x-tarattachment; filename="`+id+`.tar"` {
		t.Errorf("got %s", got)
	}
	var names []string
	for tr := tar.NewReader(bytes.NewReader(archive.body)); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
		content, err := io.ReadAll(tr)
		must(t, err)
		names = append(names, fmt.Sprint(h.Name, " ", len(content), " ", h.Linkname))
	}
	if got := strings.Join(names, ","); got != "a.html 25 ,dir/ 0 ,dir/empty 0 ,dir/large 2400000 ,link 0 /etc/passwd" {
		t.Errorf("got %s", got)
	}
	shown := g.get("/api/sessions/"+id).want(t, 200)
	if shown.text("snapshot") != snap || shown.text("snapshotAt") != "2026-03-04T05:06:07Z" || shown.field("workspaceFiles") != json.Number("5") {
		t.Errorf("got %s", shown)
	}
}

// TestFiles_DamagedSnapshotIsNotServed tests that a damaged snapshot is never served as if it were complete.
func TestFiles_DamagedSnapshotIsNotServed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	g := w.gateway(gateway.Config{})
	id := w.session("default")
	snap := w.snapshot("default", id, snapshotTime, [2]string{"a", "content"}, [2]string{"b", strings.Repeat("x", 1<<20)})
	at := "/api/sessions/" + id + "/files"
	list, err := w.bucket().List(t.Context())
	must(t, err)
	for _, o := range list {
		if strings.Contains(o.Name, "/p-") {
			_, err := w.bucket().PutBytes(t.Context(), o.Name, make([]byte, o.Size))
			must(t, err)
		}
	}
	g.get(at).want(t, 200)
	g.get(at+"/a").wantProblem(t, 500, "INTERNAL", "")
	req, err := http.NewRequestWithContext(t.Context(), "GET", g.url+at, nil)
	must(t, err)
	req.Header.Set("Accept", "application/x-tar")
	if resp, err := client.Do(req); err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err == nil {
			t.Error("a tar that was cut off looks whole")
		}
	}
	must(t, w.bucket().Delete(context.Background(), "default/"+id+"/"+snap))
	g.get(at).wantProblem(t, 500, "INTERNAL", "")
}

func TestFiles_BadInputNamesTheField(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.serveCommands()
	g := w.gateway(gateway.Config{})
	// The ids are old, so that reads do not wait for a recent creation.
	id, other, gone := w.session("default"), oldID(t, events.KindSession), oldID(t, events.KindSession)
	w.emit("acme", other, events.Event{Data: events.SessionCreated{Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local"}})
	w.snapshot("default", id, snapshotTime, [2]string{"a", "x"})
	w.snapshot("acme", other, snapshotTime, [2]string{"a", "x"})
	at := "/api/sessions/" + id + "/files"
	paths := []string{
		"/../a", "/a/../../b", "/a/..", "//etc/passwd", "/%2Fetc/passwd", "/%2e%2e/a", "/a%5Cb", "/..%5Ca", "/a%00b", "/a//b", "/a/", "/./a", "/", "/a%ff",
		"/" + strings.Repeat("a/", 2048) + "b", "/" + strings.Repeat("a", 256), "/../" + other + "/files/a",
	}
	for _, path := range paths {
		for _, method := range []string{"GET", "PUT", "DELETE"} {
			g.do(method, at+path, "").wantProblem(t, 400, "INVALID_REQUEST", "path")
		}
	}
	for _, c := range []struct {
		method, path, kind string
		status             int
		code, field        string
	}{
		{"GET", at + "?dir=..", "", 400, "INVALID_REQUEST", "dir"},
		{"PUT", at + "?dir=/etc", "application/x-tar", 400, "INVALID_REQUEST", "dir"},
		{"PUT", at + "?path=a", "application/x-tar", 400, "INVALID_REQUEST", "path"},
		{"PUT", at, "", 400, "INVALID_REQUEST", "Content-Type"},
		{"PUT", at, "application/zip", 400, "INVALID_REQUEST", "Content-Type"},
		{"PUT", at + "/a?mode=4755", "", 400, "INVALID_REQUEST", "mode"},
		{"PUT", at + "/a?mode=rwx", "", 400, "INVALID_REQUEST", "mode"},
		{"PUT", at + "/a?mode=644&mode=755", "", 400, "INVALID_REQUEST", "mode"},
		{"GET", at + "/a?minPosition=x", "", 400, "INVALID_REQUEST", "minPosition"},
		{"GET", at + "/a?rev=1", "", 400, "INVALID_REQUEST", "rev"},
		{"DELETE", at + "/a?rev=1", "", 400, "INVALID_REQUEST", "rev"},
		{"DELETE", at, "", 405, "METHOD_NOT_ALLOWED", ""},
		{"POST", at + "/a", "", 405, "METHOD_NOT_ALLOWED", ""},
		{"GET", "/api/sessions/x/files", "", 400, "INVALID_REQUEST", "sessionId"},
		{"PUT", "/api/sessions/x/files/a", "", 400, "INVALID_REQUEST", "sessionId"},
		{"DELETE", "/api/sessions/x/files/a", "", 400, "INVALID_REQUEST", "sessionId"},
		{"GET", "/api/sessions/" + gone + "/files", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"PUT", "/api/sessions/" + gone + "/files/a", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"DELETE", "/api/sessions/" + gone + "/files/a", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		// Another tenant's session does not exist.
		{"GET", "/api/sessions/" + other + "/files", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"GET", "/api/sessions/" + other + "/files/a", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"PUT", "/api/sessions/" + other + "/files/a", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"DELETE", "/api/sessions/" + other + "/files/a", "", 404, "SESSION_NOT_FOUND", "sessionId"},
		{"GET", "/api/sessions/" + id + "/filesystem", "", 404, "NOT_FOUND", ""},
	} {
		var opts []option
		if c.kind != "" {
			opts = append(opts, header("Content-Type", c.kind))
		}
		g.do(c.method, c.path, "", opts...).wantProblem(t, c.status, c.code, c.field)
	}
	s.mu.Lock()
	s.refuse = func(c command.Command) *command.Error {
		return &command.Error{Code: "TOO_MANY_FILES", Detail: "too many wait: send a tar"}
	}
	s.mu.Unlock()
	if a := g.do("PUT", at+"/a", "x").wantProblem(t, 429, "TOO_MANY_FILES", ""); a.header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	w.exec("UPDATE sessions SET status = 'closed' WHERE id = $1", id)
	g.do("PUT", at+"/a", "x").wantProblem(t, 409, "SESSION_CLOSED", "sessionId")
}
