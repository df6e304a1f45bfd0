package loadgen

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Sample is one operation with the times at which what it asked for came true,
// monotonic nanoseconds; 0 means never.
type Sample struct {
	Kind     string `json:"kind"` // "ticket", "campaign"
	Key      string `json:"key"`
	Intended int64  `json:"intended"`
	Accepted int64  `json:"accepted,omitempty"` // the far side had it
	Sent     int64  `json:"sent,omitempty"`     // the system had written that down
}

// Since is the time from the intended time to t; [Never] when t is 0.
func (s Sample) Since(t int64) time.Duration {
	if t == 0 {
		return Never
	}
	return time.Duration(t - s.Intended)
}

// SamplesFile is the name of a run's raw samples.
const SamplesFile = "samples.ndjson.gz"

// WriteSamples writes raw samples to a file, one JSON object per line,
// compressed. The same samples give the same bytes.
func WriteSamples(path string, samples []Sample) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	defer func() {
		if closeErr := f.Close(); err == nil && closeErr != nil {
			err = fmt.Errorf("samples: %w", closeErr)
		}
	}()
	packed := gzip.NewWriter(f)
	buf := bufio.NewWriter(packed)
	enc := json.NewEncoder(buf)
	for _, s := range samples {
		if err := enc.Encode(s); err != nil {
			return fmt.Errorf("samples: %w", err)
		}
	}
	if err := errors.Join(buf.Flush(), packed.Close()); err != nil {
		return fmt.Errorf("samples: %w", err)
	}
	return nil
}

// ReadSamples reads what [WriteSamples] wrote.
func ReadSamples(path string) ([]Sample, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("samples: %w", err)
	}
	defer f.Close()
	packed, err := gzip.NewReader(f)
	if err != nil {
		return nil, fmt.Errorf("samples %s: %w", path, err)
	}
	var samples []Sample
	for dec := json.NewDecoder(packed); ; {
		var s Sample
		if err := dec.Decode(&s); errors.Is(err, io.EOF) {
			return samples, nil
		} else if err != nil {
			return nil, fmt.Errorf("samples %s: %w", path, err)
		}
		samples = append(samples, s)
	}
}
