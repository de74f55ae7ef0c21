-- A job of a Program that is with the rank goes back: to the rank's stream, or, where the rank lost it, to the front of
-- the pool. Then the Program has no place, once all of its jobs are there.
local function put_back(at, p, job, leases, timers, tally, token, why)
  if not is_stale(at, p) then
    local entry = redis.call('XADD', at.stream, '*', 'job', token, 'program', p[0].id)
    return requeue(job, at.stream, leases, timers, tally, token, why, at.ms, entry)
  end
  requeue(job, at.stream, leases, timers, tally, token, why, at.ms, '0-0')
  redis.call('LPUSH', p[0].pool, redis.call('HGET', job, 'ticket'))
  returned(at, p, token)
  if p.inflight == 0 then pause(at, p, lost_why(at)) else account(at, p) end
end
