-- sweep: which leases have run out, which entries were read but never begun, and whether entries are missing.
-- Changes no job.
-- A gap since the last sweep longer than half a lease, or a clock that went back, means that renewals may have been
-- impossible: then nothing expires for a full lease.
-- After a clock that went back, leases lie ahead by as much: they are cut to a full one, or a dead rank would keep its
-- jobs for that long.
-- Every unended job waits in its lane or has one entry, so when those are fewer, some are lost. A running job whose entry is
-- gone ends without it, so this is told once in four leases at most.
-- Consumers that hold nothing and have not read for two leases belong to ranks that are gone, and go too.
-- KEY sweep hash
-- KEY leases zset
-- KEY queue stream
-- KEY index zset
-- KEY backlog zset
-- KEY model hash
-- ARG lease ms
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"hold", unloads} | {"ok", unloads, {token ...}, {entry ...}, 1 when entries are missing}; unloads: 1 while its model
--   is being unloaded
local at_ms = now_ms()
local unloads = redis.call('HGET', model, 'phase') == 'unloading' and 1 or 0
local seen = redis.call('HMGET', sweep, 'last_ms', 'hold_until_ms', 'rebuilt_ms')
local gap_ms = seen[1] and at_ms - tonumber(seen[1])
local hold_until_ms = tonumber(seen[2] or 0)
local gap = gap_ms and (gap_ms < 0 or gap_ms > lease / 2)
if gap or not gap_ms then hold_until_ms = at_ms + lease end
redis.call('HSET', sweep, 'last_ms', at_ms, 'hold_until_ms', hold_until_ms)
if gap then redis.call('HSET', sweep, 'back_ms', at_ms) end
if gap and gap_ms < 0 then
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', leases, '(' .. at_ms + lease, '+inf', 'LIMIT', 0, 1000)) do
    redis.call('ZADD', leases, at_ms + lease, token)
  end
end
if hold_until_ms > at_ms then return {'hold', unloads} end
local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', at_ms, 'LIMIT', 0, 100)
local unbegun = {}
if redis.call('EXISTS', queue) == 1 then
  local pending = redis.pcall('XPENDING', queue, 'workers', 'IDLE', lease, '-', '+', 100)
  if not pending.err then
    for i, item in ipairs(pending) do unbegun[i] = item[1] end
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', queue, 'workers')) do
      local _, name, _, held, _, idle_ms = unpack(consumer)
      if held == 0 and idle_ms > 2 * lease then redis.call('XGROUP', 'DELCONSUMER', queue, 'workers', name) end
    end
  end
end
local missing = 0
local since_ms = at_ms - tonumber(seen[3] or 0)
-- Further choices of a job have no time in the index.
local placed = redis.call('XLEN', queue) + redis.call('ZCARD', backlog)
if (since_ms < 0 or since_ms > 4 * lease) and redis.call('ZCOUNT', index, 1, '+inf') > placed then
  missing = 1
  redis.call('HSET', sweep, 'rebuilt_ms', at_ms)
end
return {'ok', unloads, expired, unbegun, missing}
