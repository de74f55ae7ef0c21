-- heartbeat: register a rank, or renew it. One live incarnation a rank id. Tells whether its model is wanted.
-- KEY record hash the rank's facts, TTL = its lease
-- KEY ranks zset
-- KEY model hash
-- ARG rank str
-- ARG incarnation str random, one life of the process
-- ARG replace flag 1: the caller knows that the former incarnation is dead
-- ARG state str what it does with its model
-- ARG lease ms
-- ARG fields list name, value ... of the facts
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", wanted or "", change, change that a rank has carried out, ms that are left to drain} | {"taken", host, pid}
local seen = redis.call('HMGET', record, 'incarnation', 'host', 'pid')
if seen[1] and seen[1] ~= incarnation and replace == 0 then return {'taken', seen[2], seen[3]} end
redis.call('HSET', record, 'incarnation', incarnation, 'state', state, unpack(fields))
redis.call('PEXPIRE', record, lease)
local at_ms = now_ms()
redis.call('ZREMRANGEBYSCORE', ranks, '-inf', at_ms)
redis.call('ZADD', ranks, at_ms + lease, rank)
redis.call('PEXPIRE', ranks, lease)
local wish = redis.call('HMGET', model, 'wanted', 'change', 'done', 'until_ms', 'failed')
if state == 'loaded' and wish[1] == 'loaded' and (wish[5] or wish[3] ~= wish[2]) then
  redis.call('HSET', model, 'done', wish[2])
  redis.call('HDEL', model, 'failed')
end
return {'ok', wish[1] or '', tonumber(wish[2] or 0), tonumber(wish[3] or 0), math.max((wish[4] or at_ms) - at_ms, 0)}
