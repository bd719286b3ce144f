// Package inspector measures the inspector, the page that the gateway serves, in Chromium: how soon a long session and a
// long list are shown, how smoothly they scroll, how much memory they take, and what text in flight costs.
package inspector

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/projector"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets.
const (
	// maxPaintAfterData is the performance target: the maximum time from the end of the response with the first blocks, or
	// the first sessions, until they are painted.
	maxPaintAfterData = time.Second
	// maxHeapBytes is the performance target: the maximum JavaScript heap of the page, after a collection.
	maxHeapBytes = 300e6
	// maxOpenBytes is the performance target: the maximum number of bytes that are read until the page is shown.
	maxOpenBytes = 2e6
	// maxCores is the performance target: the maximum share of a core that the page takes while it receives text.
	maxCores = 0.5
)

const (
	// eventsPerTurn is the number of events in a turn of the filled log.
	eventsPerTurn = 23
	// deltaInterval is the time between two pieces of text.
	deltaInterval = time.Millisecond
	// deltasPerBlock is the number of pieces of text in a block.
	deltasPerBlock = 2000
	// pageTimeout is the time limit for the measurement of one page, beside the time that it lasts.
	pageTimeout = 3 * time.Minute
)

// Benchmark is the subcommand inspector of the benchmark program.
type Benchmark struct {
	Events   harness.PositiveCount `default:"100000" help:"Events of the session that is opened."`
	Sessions harness.PositiveCount `default:"10000" help:"Sessions of the list that is opened."`
	Seconds  harness.PositiveCount `default:"10" help:"Seconds of scrolling, and of text in flight."`
}

// measurement holds the results that measure.mjs prints.
type measurement struct {
	Bytes, LaterBytes         float64 // read until the first paint, and in the two seconds after it
	PaintMs, AfterDataMs      float64
	LongFrames                int // frames of more than 50 ms
	LongestFrameMs, HeapBytes float64
	RendererCores, AllCores   float64
	Rows, Characters          int // what was shown at the end
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	chromium, err := exec.LookPath("chromium")
	if err != nil {
		b.PrintSkipped("all rows", err)
		return nil
	}
	measure := func(ctx context.Context, scenario, url string) (*measurement, error) {
		ctx, cancel := context.WithTimeout(ctx, pageTimeout+time.Duration(m.Seconds)*time.Second)
		defer cancel()
		cmd := exec.CommandContext(ctx, "node", "bench/inspector/measure.mjs", scenario, url, fmt.Sprint(int(m.Seconds))) //nolint:gosec // this benchmark's script
		cmd.Env = append(cmd.Environ(), "SPOOL_CHROMIUM="+chromium)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("measure %s: %w: %s", url, err, stderr.String())
		}
		var r measurement
		return &r, json.Unmarshal(out, &r)
	}
	for _, part := range []struct {
		name            string
		sessions, turns int
	}{
		{fmt.Sprintf("a session with %d events", int(m.Events)), 1, int(m.Events) / eventsPerTurn},
		{fmt.Sprintf("a list of %d sessions", int(m.Sessions)), int(m.Sessions), int(m.Sessions)},
	} {
		if err := b.RunPart(fmt.Sprint(part.sessions), func(b *harness.Bench) error {
			url, err := projector.ServeFilledLog(ctx, b, part.sessions, max(1, part.turns))
			if err != nil {
				return err
			}
			path := "/"
			if part.sessions == 1 {
				path = "/sessions/" + projector.FirstSession()
			}
			r, err := measure(ctx, "open", url+path)
			if err != nil {
				return err
			}
			return reportOpen(b, part.name, r)
		}); err != nil {
			return err
		}
	}
	return b.RunPart("text", func(b *harness.Bench) error { return m.measureText(ctx, b, measure) })
}

// reportOpen reports the rows about a page that was opened and scrolled.
func reportOpen(b *harness.Bench, name string, r *measurement) error {
	return errors.Join(
		b.ReportRow(row.Row{
			What: "inspector: first paint of " + name, Target: fmt.Sprintf("under %.0f s after its data, under %.0f MB read", maxPaintAfterData.Seconds(), maxOpenBytes/1e6),
			Measured: fmt.Sprintf("%.0f ms after its data, %.0f ms after the start, %.2f MB read, %.2f MB in the two seconds after it", r.AfterDataMs, r.PaintMs, r.Bytes/1e6, r.LaterBytes/1e6),
			OK:       r.AfterDataMs < float64(maxPaintAfterData.Milliseconds()) && r.Bytes < maxOpenBytes,
		}),
		b.ReportRow(row.Row{
			What: "inspector: scrolling " + name, Target: "no frame over 50 ms",
			Measured: fmt.Sprintf("%d frames over 50 ms, the longest %.0f ms", r.LongFrames, r.LongestFrameMs), OK: r.LongFrames == 0,
			Note: "Chromium without a GPU, with all services on the same machine",
		}),
		b.ReportRow(row.Row{
			What: "inspector: memory of " + name, Target: fmt.Sprintf("under %.0f MB", maxHeapBytes/1e6),
			Measured: fmt.Sprintf("%.0f MB of JavaScript heap after scrolling", r.HeapBytes/1e6), OK: r.HeapBytes < maxHeapBytes,
		}))
}

// measureText measures a page that receives text in flight, and reports its row.
func (m *Benchmark) measureText(ctx context.Context, b *harness.Bench, measure func(context.Context, string, string) (*measurement, error)) error {
	sys, err := b.StartSystem(ctx, system.Config{Provider: fake.New(writeText)})
	if err != nil {
		return err
	}
	c := system.NewClient(sys.URL)
	session, err := c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"})
	if err != nil {
		return err
	}
	if _, err := c.PostMessage(ctx, session, "write"); err != nil {
		return err
	}
	r, err := measure(ctx, "text", sys.URL+"/sessions/"+session)
	if err != nil {
		return err
	}
	return errors.Join(b.ReportRow(row.Row{
		What: fmt.Sprintf("inspector: text in flight, %d deltas/s", time.Second/deltaInterval), Target: fmt.Sprintf("under %.1f cores", maxCores),
		Measured: fmt.Sprintf("%.2f cores of the page's process; %d frames over 50 ms", r.RendererCores, r.LongFrames), OK: r.RendererCores < maxCores,
		Note: fmt.Sprintf("all processes of Chromium, which paints without a GPU: %.2f cores", r.AllCores),
	}), c.DeleteSession(ctx, session))
}

// writeText is the fake.Script of the session that receives text: it writes blocks of text without end.
func writeText(ctx context.Context, t *fake.Turn) {
	ticker := time.NewTicker(deltaInterval)
	defer ticker.Stop()
	for n := 0; ; n++ {
		id := fmt.Sprint("b", n)
		t.OpenBlock(id)
		var text strings.Builder
		for i := range deltasPerBlock {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			}
			piece := "word "
			if i%100 == 99 {
				piece = "end of a paragraph.\n\n"
			}
			t.AppendText(id, text.Len(), piece)
			text.WriteString(piece)
		}
		t.CompleteBlock(id, text.String())
	}
}
