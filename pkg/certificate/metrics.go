package certificate

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Collector shows the certificate of a listener to Prometheus, once there is one. It is safe for concurrent use.
type Collector struct {
	expiry, failed *prometheus.Desc
	source         atomic.Pointer[func() (notAfter time.Time, err error)]
}

// NewCollector makes a Collector whose metrics have names with a prefix, "spool_gateway_" for example.
func NewCollector(prefix string) *Collector {
	return &Collector{
		expiry: prometheus.NewDesc(prefix+"certificate_expiry_seconds", "Seconds until the certificate of tls-cert expires; negative once it has.", nil, nil),
		failed: prometheus.NewDesc(prefix+"certificate_reload_failed", "1 while tls-cert or tls-key have changed and cannot be used: the former certificate is served.", nil, nil),
	}
}

// Watch sets where the certificate comes from: when it expires, and an error while changed files cannot be used.
func (c *Collector) Watch(source func() (notAfter time.Time, err error)) { c.source.Store(&source) }

// Describe sends the descriptions of the two metrics.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	to <- c.expiry
	to <- c.failed
}

// Collect sends the two metrics, none without a certificate.
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
