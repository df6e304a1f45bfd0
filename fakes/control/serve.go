package control

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Side is a control API that listens on an address of its own.
type Side struct {
	l      net.Listener
	srv    *http.Server
	stop   context.CancelFunc
	served chan error
}

// Serve listens on addr and serves h until Close.
func Serve(addr string, h http.Handler) (*Side, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	// Event streams end with this context, so that closing waits for nobody.
	ctx, stop := context.WithCancel(context.Background())
	side := &Side{l: l, stop: stop, served: make(chan error, 1), srv: &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       time.Minute,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}}
	go func() { side.served <- side.srv.Serve(l) }()
	return side, nil
}

// URL of the API, "" for a nil Side.
func (s *Side) URL() string {
	if s == nil {
		return ""
	}
	return "http://" + s.l.Addr().String()
}

// closeTimeout bounds the wait for requests at Close.
const closeTimeout = 10 * time.Second

// Close ends all streams and requests. The nil Side has none.
func (s *Side) Close() error {
	if s == nil {
		return nil
	}
	s.stop()
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	err := s.srv.Shutdown(ctx)
	if served := <-s.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
