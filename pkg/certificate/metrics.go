package certificate

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Collector exports the certificate of a listener to Prometheus. It exports nothing until SetSource was called. It is
// safe for concurrent use.
type Collector struct {
	expiry, failed *prometheus.Desc
	source         atomic.Pointer[func() (notAfter time.Time, err error)]
}

// NewCollector returns a Collector whose metric names begin with prefix, for example "spool_gateway_".
func NewCollector(prefix string) *Collector {
	return &Collector{
		expiry: prometheus.NewDesc(prefix+"certificate_expiry_seconds", "Seconds until the certificate of tls-cert expires; negative after the expiry.", nil, nil),
		failed: prometheus.NewDesc(prefix+"certificate_reload_failed", "1 while the changed tls-cert or tls-key cannot be used and the former certificate is served.", nil, nil),
	}
}

// SetSource sets the function that returns when the certificate expires, and an error while changed certificate files
// cannot be used.
func (c *Collector) SetSource(source func() (notAfter time.Time, err error)) { c.source.Store(&source) }

// Describe sends the descriptions of the two metrics: the expiry of the certificate, and whether its files can be read.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	to <- c.expiry
	to <- c.failed
}

// Collect sends the values of the two metrics, or nothing before SetSource was called.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	source := c.source.Load()
	if source == nil {
		return
	}
	notAfter, err := (*source)()
	failed := 0.
	if err != nil {
		failed = 1
	}
	to <- prometheus.MustNewConstMetric(c.expiry, prometheus.GaugeValue, time.Until(notAfter).Seconds())
	to <- prometheus.MustNewConstMetric(c.failed, prometheus.GaugeValue, failed)
}
