package live

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// BenchmarkAppend measures the cost of one event for one client: a copy, with or without metadata.
func BenchmarkAppend(b *testing.B) {
	frame := Frame{
		JSON:     []byte(`{"seq":1,"data":{"text":"` + strings.Repeat("x", 400) + `"}}`),
		Metadata: reads.NewMetadata(`{"ticket":"`+strings.Repeat("s", 100)+`"}`, `{"run":"`+strings.Repeat("m", 100)+`"}`),
	}
	for name, with := range map[string]bool{"bare": false, "metadata": true} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			buf := make([]byte, 0, 4096)
			for b.Loop() {
				buf = frame.Append(buf[:0], with)
			}
		})
	}
}
