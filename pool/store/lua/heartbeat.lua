-- heartbeat: register a rank, or renew it. One live incarnation a rank id.
-- KEY record hash the rank's facts, TTL = its lease
-- KEY ranks zset
-- ARG rank str
-- ARG incarnation str random, one life of the process
-- ARG replace flag 1: the caller knows that the former incarnation is dead
-- ARG lease ms
-- ARG fields list name, value ... of the facts
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok"} | {"taken", host, pid}
local seen = redis.call('HMGET', record, 'incarnation', 'host', 'pid')
if seen[1] and seen[1] ~= incarnation and replace == 0 then return {'taken', seen[2], seen[3]} end
redis.call('HSET', record, 'incarnation', incarnation, unpack(fields))
redis.call('PEXPIRE', record, lease)
local at_ms = now_ms()
redis.call('ZREMRANGEBYSCORE', ranks, '-inf', at_ms)
redis.call('ZADD', ranks, at_ms + lease, rank)
redis.call('PEXPIRE', ranks, lease)
return {'ok'}
